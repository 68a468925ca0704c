"""Halves of the heads: a rank attends to its local keys with one half first, the other last.

Then both the first transfer and the last one, which returns the gradients of the local keys,
overlap with a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.base import Grads, Inputs, Kernel, Rows
from maxattn.masks import Mask


class Heads(NamedTuple):
    """Part number `part` of the heads, which are cut into `parts` equal parts."""

    part: int = 0
    parts: int = 1

    def of(self, x: Array, axis: int) -> Array:
        """Slice these heads out of an array."""
        n = x.shape[axis] // self.parts
        return jax.lax.slice_in_dim(x, self.part * n, (self.part + 1) * n, axis=axis)


ALL, FIRST, SECOND = Heads(), Heads(0, 2), Heads(1, 2)


def may_halve(heads: int, kv_heads: int, mask: Mask, biased: bool) -> bool:
    """Return whether a device's local keys can be computed by halves of the heads.

    Each half needs an even number of heads, which a TPU's two cores share. The mask must be the
    same for all heads, and there must be no bias.
    """
    has_head_axis = any("N" in letters for letters in jax.tree.leaves(mask.leaf_axes()))
    return heads % 4 == 0 and kv_heads % 2 == 0 and not has_head_axis and not biased


def operands(heads: Heads, inputs: Inputs) -> Inputs:
    """Return the operands with q, k and v of the given heads, and without a bias."""
    q, k, v = (heads.of(x, 2) for x in (inputs.q, inputs.k, inputs.v))  # [B, T, N, H]
    return inputs.replace(q=q, k=k, v=v, bias=None)


def of_rows(heads: Heads, rows: Rows) -> Rows:
    """Slice the backward's `Rows` of the given heads."""
    out, dout = (heads.of(x, 2) for x in (rows.out, rows.dout))  # [B, T, N, H]
    return Rows(out, heads.of(rows.lse, 1), dout, heads.of(rows.dlse, 1))  # [B, N, T]


def joined(parts: Sequence[Array], axis: int) -> Array:
    return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]


def backward(kernel: Kernel, heads: Heads, inputs: Inputs, rows: Rows) -> Grads:
    """Run a kernel's backward for the given heads; gradients of other heads are 0."""
    if heads == ALL:
        return kernel.backward(inputs, rows)
    *found, _ = kernel.backward(operands(heads, inputs), of_rows(heads, rows))

    def widened(x: Array) -> Array:
        n = x.shape[2]
        others = heads.part * n, (heads.parts - 1 - heads.part) * n
        return jnp.pad(x, ((0, 0), (0, 0), others, (0, 0)))

    return Grads(*map(widened, found))
