"""One attention of a model, with its class and call in diffusers and in maxattn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float

import maxattn as ma

B, N, H = 2, 2, 8
C = N * H
"""Examples, heads, channels of a head and of a token; a case may have its own."""

S = 3
KEPT = np.arange(S) < np.array([[S], [S - 1]])
"""Tokens of a text, and which of them are no padding."""

DENSE = ma.AttentionConfig(attention="dot_product", cross_attention="dot_product")
HOW: dict[str, Any] = {"heads": N, "dim_head": H, "config": DENSE}
Shapes = Mapping[str, tuple[int, ...]]
Numbers = dict[str, Float[np.ndarray, "..."]]


@dataclass(frozen=True)
class Attention:
    """One attention of a model."""

    made: Callable[[], Any]  # makes diffusers' module
    # calls it with torch's inputs, by name; returns one tensor or several
    run: Callable[[Any, dict[str, Any]], Any]
    ours: Callable[[nnx.Rngs], nnx.Module]  # makes our module
    # calls it with arrays, by name; returns as many as `run`
    call: Callable[[Any, dict[str, Any]], Any]
    inputs: Shapes  # the shapes of the inputs


def drawn(shapes: Shapes, seed: int) -> Numbers:
    """Draw numbers that are always the same, so that no file needs to store them.

    Args:
        shapes: by name: inputs, or the parameters of a module, in which not all norms and biases
            are
            one or zero.
        seed: one for each purpose.
    """
    rng = np.random.RandomState(seed)
    return {name: _normal(rng, shapes[name]) for name in sorted(shapes)}


def _normal(rng: np.random.RandomState, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
    mean, spread = {1: (0.5, 0.3), 2: (0.0, 0.3)}.get(len(shape), (0.0, 1.0))
    return (mean + spread * rng.standard_normal(shape)).astype(np.float32)


def attention(processor: str, **how: Any) -> Any:
    """Make diffusers' shared attention class.

    Args:
        processor: "FILE.CLASS" of its processor, under `diffusers.models`.
        how: settings of the class.
    """
    place, name = processor.rsplit(".", 1)
    shared = import_module("diffusers.models.attention_processor").Attention
    made = getattr(import_module(f"diffusers.models.{place}"), name)
    return shared(C, heads=N, dim_head=H, processor=made(), **how)


def tensor(array: Any) -> Any:
    """Convert an array to torch."""
    import torch

    return torch.tensor(np.asarray(array))


def theirs(case: Attention) -> Numbers:
    """Run an attention in diffusers: `out`, all outputs concatenated, and `grad.` for all arrays.

    The gradients of inputs and parameters are for the cotangent `drawn({"dout": out.shape}, 2)`.
    """
    import torch

    module = case.made().float().eval()
    held = dict(module.named_parameters())
    weights = drawn({name: tuple(p.shape) for name, p in held.items()}, 0)
    with torch.no_grad():
        for name, parameter in held.items():
            parameter.copy_(torch.tensor(weights[name]))
    given = {k: torch.tensor(v, requires_grad=True) for k, v in drawn(case.inputs, 1).items()}
    results = case.run(module, given)
    results = (results,) if isinstance(results, torch.Tensor) else results
    out = torch.cat([each.reshape(-1) for each in results])
    dout = drawn({"dout": (1, 1, *out.shape)}, 2)["dout"]
    out.backward(torch.tensor(dout.reshape(-1)))
    every = held | {f"in.{k}": v for k, v in given.items()}
    return {"out": out.detach().numpy()} | {f"grad.{k}": v.grad.numpy() for k, v in every.items()}
