"""The cost of a step, and how much of the machine it uses.

    MFU = operations of the model / (seconds x devices x peak)

Operations are those that common/flops.py counts in the forward pass, and their backward: twice
as many for products (once, where LoRA leaves the weights alone), two and a half times for
attention. What rematerialisation computes again does not count. The peak is the published one of
dense bfloat16 products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

import maxattn as ma
from maxattn.devices import peak_flops
from maxattn_examples.common import flops

from .settings import TrainingSettings


@dataclass(frozen=True)
class Cost:
    """The cost of one step over all devices.

    Args:
        tokens: of the batch.
        flops: floating-point operations; 0 where they are not counted.
        peak: what all devices together could compute in a second; None where that is not known.
    """

    tokens: int
    flops: float = 0.0
    peak: float | None = None

    def mfu(self, seconds: float) -> float | None:
        """Return the share of the peak that a step of so many seconds uses."""
        return self.flops / (seconds * self.peak) if self.peak and self.flops else None

    def speed(self, seconds: float | None) -> str:
        """Return tokens a second, and the MFU if it is known."""
        if seconds is None:
            return "0 tokens/s"
        share, speed = self.mfu(seconds), f"{self.tokens / seconds:,.0f} tokens/s"
        return speed if share is None else f"{speed}  MFU {share:.1%}"


def cost_of(
    training: TrainingSettings,
    tokens: int,
    mesh: jax.sharding.Mesh | None,
    forward: Callable[..., Any],
    *args: Any,
) -> Cost:
    """Count the cost of a training step on the devices of a mesh.

    Args:
        training: batch_size, gradient_accumulation_steps and lora_rank.
        tokens: of one example.
        mesh: None for one device.
        forward: the loss of a part of a batch.
        args: its arguments, arrays or their shapes.
    """
    of_one = peak_flops(ma.Target.here().device_kind)
    devices = 1 if mesh is None else mesh.size
    tokens = training.batch_size * tokens
    if of_one is None:  # nothing to compare with, so nothing is counted
        return Cost(tokens)
    work = flops.count(forward, *args)
    products = 1.0 if training.lora_rank else flops.BACKWARD["matmul"]
    each = work.matmul * (1.0 + products) + work.attention * (1.0 + flops.BACKWARD["attention"])
    return Cost(tokens, training.gradient_accumulation_steps * each, of_one * devices)
