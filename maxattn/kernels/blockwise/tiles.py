"""The arrays of one blockwise call, cut into chunks, and the scores of any pair of chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.kernels import softmax
from maxattn.kernels.base import Bias, Grads, Inputs, Result, Rows
from maxattn.kernels.blockwise.visits import Visits, visits
from maxattn.masks import Mask
from maxattn.sharding import pad_axis

LARGEST = float(np.finfo(np.float32).max)
Out = TypeVar("Out", Result, Grads)


def cut(x: Array, axis: int, size: int, fill: float = 0.0) -> Array:
    """Cut an axis into whole chunks, padded with `fill`; the new axis of chunks comes first."""
    count = -(-x.shape[axis] // size)
    x = pad_axis(x, axis, count * size, fill)
    x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def join(x: Array, axis: int, length: int) -> Array:
    """Undo `cut` and drop the padding; `axis` does not count the axis of chunks."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


@dataclass
class ChunkedInputs:
    """The arrays of one call, cut into chunks."""

    q: Array  # [chunks, B, K, G, bq, H]: G query heads per key head, bq queries per chunk
    # k, v: [chunks, B, K, bk, H]: bk keys per chunk
    k: Array
    v: Array
    bias: Array | None  # [B|1, K|1, G|1, T|1, S|1], T and S padded, or None
    # each query's level (bias_level.py), in the bias's shape with S = 1, or None
    level: Array | None
    lists: Visits  # the key chunks that each query chunk visits
    inputs: Inputs  # the arrays before they are cut
    scale: float  # the factor by which scores are multiplied

    @staticmethod
    def of(inputs: Inputs, chunks: tuple[int, int], scale: float) -> ChunkedInputs:
        """Cut the arrays, and list the pairs of chunks that are not empty under the mask."""
        q, k, v = inputs.q, inputs.k, inputs.v
        t, s = q.shape[1], k.shape[1]
        bq, bk = min(chunks[0], t), min(chunks[1], s)
        lists = visits(inputs.mask, bq, bk, t, s, inputs.q_offset, inputs.kv_offset)
        # This large level keeps the padded queries of the last chunk from overflow.
        bias, level = (
            _whole_chunks(x, inputs, bq, bk, fill)
            for x, fill in ((inputs.bias, 0.0), (inputs.bias_level, LARGEST))
        )
        ks, vs = (cut(softmax.split_keys(x), 2, bk) for x in (k, v))
        qs = cut(softmax.split_queries(q, k.shape[2]), 3, bq)
        return ChunkedInputs(qs, ks, vs, bias, level, lists, inputs, scale)

    @property
    def kv_len(self) -> int:
        """The number of local keys without padding."""
        return self.inputs.k.shape[1]

    @property
    def ragged(self) -> bool:
        """Whether the last key chunk has padding."""
        return self.kv_len % self.k.shape[3] != 0

    def scores(self, i: Any, q_i: Array, j: Any, mixed: Any) -> Array:
        """Compute the scores [B, K, G, bq, bk] of chunks i and j, and mask them if `mixed`."""
        given = self.bias, self.level
        bias, level = (None if x is None else self.bias_tile(x, i, j) for x in given)
        s = softmax.scores(q_i, self.k[j], self.scale, bias, level, None)
        if self.ragged:
            mixed = mixed | (j == self.k.shape[0] - 1)
        return jax.lax.cond(
            mixed, lambda x: jnp.where(self.allowed(i, j), x, softmax.NEG_INF), lambda x: x, s
        )

    def allowed(self, i: Any, j: Any) -> Array:
        """Evaluate the mask on one pair of chunks: [B|1, K|1, G|1, bq|1, bk|1]."""
        bq, bk = self.q.shape[4], self.k.shape[3]
        q_idx, kv_idx = i * bq + np.arange(bq), j * bk + np.arange(bk)
        offsets = self.inputs.q_offset, self.inputs.kv_offset
        allowed = self.inputs.mask.allowed(q_idx, kv_idx, *offsets)
        allowed = softmax.split_heads(allowed, self.k.shape[2])
        return allowed & (kv_idx < self.kv_len)[None, None, None, None] if self.ragged else allowed

    def bias_tile(self, bias: Any, i: Any, j: Any) -> Array:
        """Slice the bias, or its level, for one pair of chunks; axes of size 1 are kept."""
        starts, sizes = self._bias_window(bias, i, j)
        return jax.lax.dynamic_slice(bias, starts, sizes)

    def add_bias_tile(self, total: Array, tile: Array, i: Any, j: Any) -> Array:
        """Add the dS of one pair of chunks to the bias gradient, summed over broadcast axes."""
        starts, sizes = self._bias_window(total, i, j)
        old = jax.lax.dynamic_slice(total, starts, sizes)
        return jax.lax.dynamic_update_slice(total, old + softmax.fold_like(tile, sizes), starts)

    def _bias_window(self, bias: Array, i: Any, j: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        bq, bk = self.q.shape[4], self.k.shape[3]
        t, s = bias.shape[3] > 1, bias.shape[4] > 1
        zero = jnp.zeros((), jnp.int32)
        # With jax_enable_x64 i and j may have different int dtypes, which a slice refuses.
        row, column = (jnp.asarray(x, jnp.int32) for x in (i * bq, j * bk))
        starts = (zero, zero, zero, row if t else zero, column if s else zero)
        return starts, (*bias.shape[:3], bq if t else 1, bk if s else 1)


def _whole_chunks(x: Bias, inputs: Inputs, bq: int, bk: int, fill: float) -> Array | None:
    """Split the heads of a bias, or of its level, and pad it with `fill` to whole chunks."""
    if x is None:
        return None
    x = softmax.split_heads(x, inputs.k.shape[2])
    t, s = -(-inputs.q.shape[1] // bq) * bq, -(-inputs.k.shape[1] // bk) * bk
    x = pad_axis(x, 3, t, fill) if x.shape[3] > 1 else x
    return pad_axis(x, 4, s, fill) if x.shape[4] > 1 else x


def for_visits(lists: Visits, row: tuple[Any, ...], step: Any, carry: Any) -> Any:
    """Fold `step(j, mixed, carry)` over the key chunks of a row (index, mixed, count)."""
    index, mixed, count = row
    if lists.static and (lists.count == 1).all():
        return step(index[0], mixed[0], carry)
    return jax.lax.fori_loop(0, count, lambda t, c: step(index[t], mixed[t], c), carry)


# ---- batch row by batch row, if their empty chunks differ ----------------------------------------


def differs_by_row(mask: Mask) -> bool:
    """Check whether a mask's arrays can leave other chunks empty in each batch row."""
    axes = jax.tree.leaves(mask.leaf_axes())
    return mask.bounds_tiles and any("B" in letters for letters in axes)


def has_own_rows(inputs: Inputs) -> bool:
    """Check whether to compute batch rows one by one: chunks differ, and rows share no bias."""
    batch, bias = inputs.q.shape[0], inputs.bias
    apart = batch > 1 and (bias is None or bias.shape[0] == batch)
    return apart and differs_by_row(inputs.mask)


def by_row(compute: Callable[..., Out], inputs: Inputs, *rows: Rows) -> Out:
    """Call a kernel's forward or backward on one batch row after the other."""
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
    """Replace each array by whether it has a batch axis of full size."""
    batch = inputs.q.shape[0]
    of_mask = jax.tree.map(lambda letters: letters.startswith("B"), inputs.mask.leaf_axes())
    has_rows = jax.tree.map(lambda x: np.ndim(x) > 0 and x.shape[0] == batch, inputs)
    return has_rows.replace(mask=of_mask)
