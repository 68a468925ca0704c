"""LoRA: a trained low-rank change of each attention projection, whose own weights are frozen.

    y = W x + b + (alpha / rank) B A x,  A [rank, in] random, B [out, rank] zero at first

The parameters of a projection keep their names; beside them are `lora_A` and `lora_B`, always
float32.

Source: Hu et al., https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import weights
from maxattn_examples.common import hosts

Attention = ma.FlaxAttention | ma.CrossAttention | ma.JointAttention


class Adapted(nnx.Linear):
    """A projection plus a low-rank change.

    Args:
        linear: the projection, or a stack along a leading axis; its parameters are reused.
    """

    def __init__(self, linear: nnx.Linear, rank: int, scale: float, *, rngs: nnx.Rngs) -> None:
        for name, value in vars(linear).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        *stack, width_in, width_out = linear.kernel.get_value().shape
        names = linear.kernel.get_metadata().get("out_sharding") or (None,) * (len(stack) + 2)
        down = jax.random.normal(rngs.params(), (*stack, width_in, rank)) / np.sqrt(width_in)
        up = jnp.zeros((*stack, rank, width_out))
        self.scale = scale
        self.lora_A = lora_param(down, (*names[:-1], None))
        self.lora_B = lora_param(up, (*names[:-2], None, names[-1]))

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Return the projection plus the change."""
        y = super().__call__(x)
        down, up = (matrix[...].astype(y.dtype) for matrix in (self.lora_A, self.lora_B))
        return y + self.scale * ((x.astype(y.dtype) @ down) @ up)


def lora_param(value: Array, axes: tuple[Any, ...]) -> nnx.LoRAParam:
    """Make a parameter that names its mesh axes; none need exist yet."""
    return nnx.LoRAParam(value, out_sharding=axes, eager_sharding=False)


def add(
    model: nnx.Module, rank: int, alpha: float | None, targets: tuple[str, ...], *, rngs: nnx.Rngs
) -> None:
    """Add a change to every projection of every attention, in place.

    Args:
        model: with maxattn's attention modules.
        alpha: the change is multiplied by alpha / rank; None is the rank.
        targets: names of projections; modules without one of them skip it.
    """
    for module in list(attentions(model)):
        for name in targets:
            if isinstance(linear := getattr(module, name, None), nnx.Linear):
                setattr(module, name, Adapted(linear, rank, (alpha or rank) / rank, rngs=rngs))


def attentions(model: nnx.Module) -> Iterator[Attention]:
    """Yield the attention modules of a model."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Attention):
            yield module


def adapted(model: nnx.Module) -> Iterator[tuple[Any, Adapted]]:
    """Yield the projections of a model that have a change, with their paths."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Adapted):
            yield path, module


def to_diffusers(model: nnx.Module, prefix: str = "") -> dict[str, np.ndarray]:
    """Return the changes as `<layer>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank].

    lora_B includes the factor alpha / rank: readers without alpha assume it equals the rank, and
    get the same change. Layers that are one tensor in diffusers are concatenated.

    Args:
        prefix: of every name, such as "transformer.".
    """
    found: dict[str, np.ndarray] = {}
    kernels = defaultdict(list)
    for entry in weights.entries(model):
        kernels[entry.path].append(entry)
    for path, module in adapted(model):
        wholes = hosts.whole(module.lora_A[...]), hosts.whole(module.lora_B[...] * module.scale)
        for entry in kernels[(*path, "kernel")]:
            name = prefix + entry.name.removesuffix(".weight")
            down, up = (x if entry.layer is None else x[entry.layer] for x in wholes)
            found[f"{name}.lora_A.weight"] = np.ascontiguousarray(down.T)
            found[f"{name}.lora_B.weight"] = np.ascontiguousarray(up.T)
    return weights.fuse_lora(model, found, prefix)


def merge(model: nnx.Module, plain: nnx.Module) -> None:
    """Copy a model's parameters into one without LoRA; changes are added in float32.

    Args:
        plain: the same model without changes, perhaps without arrays.
    """
    changes = {path: change(module) for path, module in adapted(model)}
    values = {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}
    state = nnx.state(plain)
    for path, variable in nnx.to_flat_state(state):
        value = values[path]
        if path[-1] == "kernel" and path[:-1] in changes:
            value = (value.astype(jnp.float32) + changes[path[:-1]]).astype(value.dtype)
        variable.set_value(value)
    nnx.update(plain, state)


def change(linear: Adapted) -> Float[Array, "... I O"]:
    """Multiply the two matrices in float32."""
    down, up = (matrix[...].astype(jnp.float32) for matrix in (linear.lora_A, linear.lora_B))
    return linear.scale * (down @ up)
