"""One batch row after the other, so that each skips what its own lengths and ids leave empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from maxattn.kernels.base import Grads, Inputs, Result, Rows
from maxattn.masks import Mask

Out = TypeVar("Out", Result, Grads)


def differs_by_row(mask: Mask) -> bool:
    """Return whether arrays of a mask, or of its form, leave each batch row other chunks empty."""
    axes = jax.tree.leaves(mask.leaf_axes())
    return mask.bounds_tiles and any("B" in letters for letters in axes)


def has_own_rows(inputs: Inputs) -> bool:
    """Return whether there are rows to compute by themselves, each with its own mask and bias."""
    batch, bias = inputs.q.shape[0], inputs.bias
    apart = batch > 1 and (bias is None or bias.shape[0] == batch)
    return apart and differs_by_row(inputs.mask)


def by_row(compute: Callable[..., Out], inputs: Inputs, *rows: Rows) -> Out:
    """Compute batch row by batch row.

    Args:
        compute: a kernel's forward or backward, of inputs of one batch row.
        inputs: of all batch rows.
        rows: what a backward needs beside them.
    """
    given, tree = jax.tree.flatten((inputs, rows))
    own = [bool(x) for x in jax.tree.leaves((_own(inputs), jax.tree.map(lambda _: True, rows)))]
    mapped = [x[:, None] for x, is_own in zip(given, own, strict=True) if is_own]

    def one(parts: list[Any]) -> Out:
        left = iter(parts)
        leaves = [next(left) if is_own else x for x, is_own in zip(given, own, strict=True)]
        inputs, rows = jax.tree.unflatten(tree, leaves)
        return jax.tree.map(lambda x: x[0], compute(inputs, *rows))

    return jax.lax.map(one, mapped)


def _own(inputs: Inputs) -> Inputs:
    """Mark the arrays of a call that have batch rows."""
    batch = inputs.q.shape[0]
    of_mask = jax.tree.map(lambda letters: letters.startswith("B"), inputs.mask.leaf_axes())
    has_rows = jax.tree.map(lambda x: np.ndim(x) > 0 and x.shape[0] == batch, inputs)
    return has_rows.replace(mask=of_mask)
