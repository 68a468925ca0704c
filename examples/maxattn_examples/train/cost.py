"""The cost of a step in operations, and its MFU.

    MFU = operations of the model / (seconds x devices x peak)

`count` counts the operations of the forward; the backward has twice as many for matmuls (as many if
LoRA freezes the weights), two and a half times for attention. Recomputation is not counted. The
peak is the published one for dense bfloat16 matmuls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

import maxattn as ma
from maxattn.devices import peak_flops

from .settings import TrainingSettings


@dataclass(frozen=True)
class Cost:
    """The cost of one step over all devices.

    Args:
        tokens: of the batch.
        flops: floating-point operations; 0 if they are not counted.
        peak: operations per second of all devices together; None if unknown.
    """

    tokens: int
    flops: float = 0.0
    peak: float | None = None

    def mfu(self, seconds: float) -> float | None:
        """Return the share of the peak that a step of `seconds` uses."""
        return self.flops / (seconds * self.peak) if self.peak and self.flops else None

    def speed(self, seconds: float | None) -> str:
        """Return tokens per second, and the MFU if it is known."""
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
        forward: the loss of a part of a batch.
    """
    of_one = peak_flops(ma.Target.here().device_kind)
    devices = 1 if mesh is None else mesh.size
    tokens = training.batch_size * tokens
    if of_one is None:  # nothing to compare with, so nothing is counted
        return Cost(tokens)
    work = count(forward, *args)
    products = 1.0 if training.lora_rank else BACKWARD["matmul"]
    each = work.matmul * (1.0 + products) + work.attention * (1.0 + BACKWARD["attention"])
    return Cost(tokens, training.gradient_accumulation_steps * each, of_one * devices)


BACKWARD = {"attention": 2.5, "matmul": 2.0}  # of the forward


@dataclass(frozen=True)
class Work:
    """The operations of one forward pass."""

    attention: int = 0
    matmul: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.attention + other.attention, self.matmul + other.matmul)

    def total(self, training: bool, frozen: bool = False) -> float:
        """Sum both, with the backward.

        Args:
            training: whether a backward follows.
            frozen: whether the weights of matmuls are frozen, so that their backward is one matmul
                each.
        """
        factors = BACKWARD | ({"matmul": 1.0} if frozen else {})
        more = {kind: 1.0 + (factor if training else 0.0) for kind, factor in factors.items()}
        return self.attention * more["attention"] + self.matmul * more["matmul"]


def count(f: Callable[..., Any], *shapes: Any) -> Work:
    """Count the operations of a function from the shapes of its arrays."""
    return _of(jax.make_jaxpr(f)(*shapes).jaxpr)


def _of(jaxpr: Any) -> Work:
    return sum((_equation(eqn) for eqn in jaxpr.eqns), Work())


def _equation(eqn: Any) -> Work:
    name = eqn.primitive.name
    if eqn.params.get("name") == "_run" and [v.aval.ndim for v in eqn.invars[:3]] == [4, 4, 4]:
        # maxattn's own jit around every attention: q [B, T, N, H], k [B, S, K, H], v [B, S, K, V].
        (b, t, n, h), (_, s, _, v) = (eqn.invars[i].aval.shape for i in (0, 2))
        return Work(attention=2 * b * n * t * s * (h + v))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        length = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        return Work(matmul=2 * eqn.outvars[0].aval.size * length)
    if name == "conv_general_dilated":
        out = eqn.outvars[0].aval
        channels = out.shape[eqn.params["dimension_numbers"].out_spec[1]]
        return Work(matmul=2 * out.size * (eqn.invars[1].aval.size // channels))
    times = eqn.params["length"] if name == "scan" else 1
    inner = sum((_of(each) for value in eqn.params.values() for each in _jaxprs(value)), Work())
    return Work(times * inner.attention, times * inner.matmul)


def _jaxprs(value: Any) -> list[Any]:
    """Find the jaxprs in a parameter of an equation."""
    if isinstance(value, list | tuple):
        return [found for each in value for found in _jaxprs(each)]
    inner = getattr(value, "jaxpr", value)
    return [inner] if hasattr(inner, "eqns") else []
