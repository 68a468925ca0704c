"""Run a launch on a Hopper GPU: its operands, the kernel, and the merge or sum of splits.

    forward     out, lse                                    splits: slots in float32, and one merge
    backward    before    delta = rowsum(dout * out) - dlse, the LSE in base 2, zeros for dQ
                main      dQ in float32, dK, dV
                after     dQ, scaled, in q's dtype; dK and dV likewise if query heads share keys

Source: Dao-AILab, flash-attention (CuTe kernels); the launches of fa4-jax 0.1.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.kernels.base import (
    WHOLE,
    DqAccumulator,
    Grads,
    Inputs,
    KeyRange,
    Packed,
    Result,
    Rows,
)
from maxattn.kernels.fa4 import library
from maxattn.kernels.fa4.launch import Launch
from maxattn.kernels.fa4.library import BackwardOperands, ForwardOperands, KernelKind, Spec
from maxattn.kernels.fa4.mask_test import Masked
from maxattn.kernels.fa4.problem import Problem
from maxattn.kernels.fa4.tiles import kernel_width, sums_width
from maxattn.kernels.fa4.work import ALL, Uniform, items
from maxattn.kernels.softmax import BIG_LSE, NEG_INF, merge_by_lse


def _hopper() -> Any:
    return import_module("maxattn.kernels.fa4.hopper")  # imports CuTe


def _call(run: Any, out: Any, *operands: Any, in_specs: Any, **settings: Any) -> Any:
    """Call a function of hopper.py; `in_specs` has a spec, or `...` for default, per array."""
    leaves, cutejax = jax.tree.leaves(operands), import_module("cutejax")
    arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]
    # By default an array is read element by element, so that a slice may begin at any element.
    given = [
        cutejax.ArraySpec(assumed_align=x.dtype.itemsize) if spec is ... else spec
        for x, spec in zip(arrays, [*in_specs, *[...] * len(arrays)], strict=False)
    ]
    return cutejax.call(run, out, *operands, in_specs=given, vmap_method="sequential", **settings)


def _like(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# ---- forward -------------------------------------------------------------------------------------


def forward(
    p: Problem, launch: Launch, qkv: tuple[Array, ...], given: Masked, scale: float
) -> Result:
    """Return (out [B,T,N,H], lse [B,N,T]).

    Args:
        p: the problem of the operands.
        launch: the forward's launch.
        qkv: q, k and v; bfloat16 or float16.
        given: the kernel's operands for the mask or the bias.
        scale: multiplies the scores.
    """
    lib, named, (q, k, v) = library.kernels(), import_module("cutejax").ArraySpec, qkv
    spec, (tail, splits) = _spec(p, launch, q, given, scale), launch.cut
    width, tile = -(-p.head_dim // 16) * 16, launch.tile.queries
    rows = -(-p.q_len // tile) if tail == ALL else tail
    slots = splits * p.batch, rows * tile, p.heads
    whole = [
        (_like(q.shape, q.dtype), lib._QKV_SPEC),
        (_like((p.batch, p.heads, p.q_len)), lib._LSE_SPEC),
    ]
    split = [
        (_like((*slots, width)), named(static_dims=(2, 3), assumed_align=16)),
        (_like((slots[0], p.heads, slots[1])), named(assumed_align=4)),
    ]
    count = [(_like((1,), jnp.int32), named(assumed_align=4))] * launch.queue
    results = [*whole * (tail != ALL), *split * (tail != 0)]
    zero = jnp.zeros(1, jnp.int32) if launch.queue else None
    found = _arrays(p, launch, given)
    operands = ForwardOperands(q, k, v, *found, given.lengths, zero, given.arrays)
    made = _call(
        _hopper().run_forward,
        [shape for shape, _ in results + count],
        spec,
        operands,
        in_specs=[lib._QKV_SPEC] * 3 + _items_specs(found),
        out_specs=[layout for _, layout in results + count],
        # The kernel counts taken items in place.
        input_output_aliases={_place(operands, "zero"): len(results)} if launch.queue else {},
        name="maxattn_forward",
    )
    if not tail:
        return _seen(Result(*made[:2]), given.lengths)
    # Without the barrier XLA (jax 0.11.2) would write one result of the call into another.
    *whole, out, lse = jax.lax.optimization_barrier(list(made[: len(results)]))
    first = (-(-p.q_len // tile) - rows) * tile
    left = p.q_len - first
    lse = _without_empty_splits(lse[:, :, :left], given.lengths, splits, launch.tile.keys)
    parts = zip(*(x.reshape(splits, p.batch, *x.shape[1:]) for x in (out, lse)), strict=True)
    out, lse = merge_by_lse([(x[:, :left, :, : p.head_dim], y) for x, y in parts])
    last = Result(out.astype(q.dtype), lse)
    return _seen(_joined(whole, last, (1, 2), first), given.lengths)


def _seen(result: Result, lengths: Array | None) -> Result:
    """Set out to 0 and the LSE to -inf in batch rows without real keys."""
    if lengths is None:
        return result
    some = lengths[:, None, None] > 0
    out = jnp.where(some[..., None], result.out, 0).astype(result.out.dtype)
    return Result(out, jnp.where(some, result.lse, NEG_INF))


def _without_empty_splits(lse: Array, lengths: Any, splits: int, keys: int) -> Array:
    """Set the LSE of splits without real keys to -inf, so that a merge ignores their outputs."""
    if lengths is None:
        return lse
    ends = jnp.arange(splits + 1)[:, None] * -(-lengths // keys) // splits
    return jnp.where((ends[1:] > ends[:-1]).reshape(-1)[:, None, None], lse, NEG_INF)


def _joined(whole: Any, last: Any, axes: tuple[int, int], start: int) -> Any:
    """Write the results of the last tile rows into `whole`, from index `start` on."""
    if not start:
        return last
    put = jax.lax.dynamic_update_slice_in_dim
    found = [put(x, part, start, axis) for x, part, axis in zip(whole, last, axes, strict=True)]
    # Without the barrier XLA keeps the values before the update too, and copies the whole result.
    found = jax.lax.optimization_barrier(found)
    return Result(*found) if isinstance(last, Result) else found


def _spec(p: Problem, launch: Launch, q: Array, given: Masked, scale: float) -> Any:
    tiles = given.lists
    kind = KernelKind(
        cut=launch.cut,
        uniform=launch.items is not None,
        queue=p.sms if launch.queue else 0,
        lists="" if tiles is None else "ranges" if tiles.is_ranges else "explicit",
        own_rows=tiles is not None and tiles.has_batch,
        lengths=given.lengths is not None,
        writes_first=launch.writes_first,
    )
    group = p.heads // p.kv_heads
    shape = str(q.dtype), p.head_dim, group, float(scale), launch.tile
    return Spec(*shape, kind, given.test, p.bias)


def _arrays(p: Problem, launch: Launch, given: Masked) -> tuple[Any, Any]:
    """Return the lists and the items that a kernel reads; None without lists."""
    if given.lists is None:
        return None, None
    found = items(given.lists.work, (p.batch, p.heads), launch.group, launch.splits)
    return jnp.asarray(given.lists.array), jnp.asarray(found)


def _items_specs(found: tuple[Any, Any]) -> list[Any]:
    if found[0] is None:
        return []
    spec = import_module("cutejax").ArraySpec
    return [spec(assumed_align=4), spec(static_dims=(1,), assumed_align=16)]


def _place(operands: Any, name: str) -> int:
    """Return the index of an operand among all arrays."""
    before = operands[: operands._fields.index(name)]
    return len(jax.tree.leaves(before))


# ---- backward ------------------------------------------------------------------------------------


def backward(
    p: Problem,
    launch: Launch,
    qkv: tuple[Array, ...],
    rows: Rows,
    given: Masked,
    scale: float,
    dlse: Array | None = None,
) -> Grads:
    """Return (dq, dk, dv) from a given output and LSE; arguments as for `forward`.

    Args:
        rows: output, LSE and their gradients.
        dlse: the gradient of the LSE, if it has one.
    """
    hopper, lib = _hopper(), library.kernels()
    q, k, v, out, dout = (own_array(x) for x in (*qkv, rows.out, rows.dout))
    spec, (tail, splits), tile = _spec(p, launch, q, given, scale), launch.cut, launch.tile
    delta, lse, *zeros = before(spec, p, (out, dout, rows.lse), dlse, not launch.writes_first)
    shared, tiles = p.heads != p.kv_heads, -(-p.q_len // tile.queries)
    dq = _like((p.batch, p.heads, tiles * tile.queries * sums_width(p.head_dim)))
    flags = [jnp.zeros((p.batch, p.heads, tiles), jnp.int32)] if launch.writes_first else []
    padded = -(-p.kv_len // tile.keys) * tile.keys
    of_keys = _like((p.batch, p.kv_heads, padded * sums_width(p.head_dim)))
    shared_sums = [jnp.zeros(of_keys.shape, jnp.float32) for _ in range(2 * shared)]
    sums = (*zeros, *flags, *shared_sums)
    start = 0 if tail in (0, ALL) else padded - tail * tile.keys
    last = _like((splits * p.batch, p.kv_len - start, *k.shape[2:]), k.dtype)
    grads = [of_keys] * 2 if shared else [_like(k.shape, k.dtype)] * (2 * bool(start)) + [last] * 2
    found, tokens = _arrays(p, launch, given), (q, k, v, dout, lse, delta)
    operands = BackwardOperands(*tokens, *found, given.lengths, sums, given.arrays)
    numbers = import_module("cutejax").ArraySpec(assumed_align=4)
    sums_specs = [lib._F32_SPEC if x.dtype == jnp.float32 else numbers for x in sums]
    lengths_spec = [numbers] * (given.lengths is not None)
    of_grads = [lib._F32_SPEC if shared else lib._QKV_SPEC] * len(grads)
    first, place = len(flags), _place(operands, "sums")
    dq, *made = _call(
        hopper.run_backward,
        [dq, *(_like(x.shape, x.dtype) for x in flags), *grads],
        spec,
        operands,
        in_specs=[lib._QKV_SPEC] * 4
        + [lib._F32_SPEC] * 2
        + [*_items_specs(found), *lengths_spec, *sums_specs],
        out_specs=[lib._F32_SPEC] + [numbers] * first + of_grads,
        input_output_aliases={place + n: first + n for n in range(len(sums))},
        name="maxattn_backward",
    )
    made, dq = made[first:], after(spec, "dq", dq, q, scale)
    if shared:
        dk, dv = (after(spec, "dkv", x, k, by) for x, by in zip(made, (scale, 1.0), strict=True))
        return Grads(dq, dk, dv)
    if splits == 1:
        return Grads(dq, *made)
    *whole, dk, dv = jax.lax.optimization_barrier(list(made))
    apart = (x.reshape(-1, p.batch, *x.shape[1:]).astype(jnp.float32) for x in (dk, dv))
    summed = [x.sum(0).astype(k.dtype) for x in apart]
    return Grads(dq, *_joined(whole, summed, (1, 1), start))


def own_array(x: Array) -> Array:
    """Return an operand of a backward as an array that is no slice of another.

    XLA passes slices to a custom call without a copy, but then forgets which results share the
    memory of which operands (jax 0.11.2): the float32 sums, which the kernel adds to in place,
    would begin as garbage.
    """
    return jax.lax.optimization_barrier(x)


def before(
    spec: Any, p: Problem, rows: tuple[Array, Array, Array], dlse: Array | None, zeros: bool
) -> list[Array]:
    """Return delta, the LSE in base 2 and, if `zeros`, a zeroed sum for dQ.

    Args:
        spec: the backward's spec.
        p: the problem of the operands.
        rows: out, dout and lse.
        dlse: the gradient of the LSE, if it has one.
        zeros: whether to return the zeros for dQ.
    """
    lib, tile = library.kernels(), spec.tile[0]
    padded = -(-p.q_len // tile) * tile
    stats = _like((p.batch, p.heads, padded))
    dq = [_like((p.batch, p.heads, padded * sums_width(p.head_dim)))] * zeros
    delta, *others = _call(
        _hopper().run_before,
        [stats, stats, *dq],
        _plain(spec),
        *rows,
        in_specs=[lib._QKV_SPEC, lib._QKV_SPEC, lib._LSE_SPEC],
        out_specs=lib._F32_SPEC,
        name="maxattn_backward_before",
    )
    if dlse is not None:  # dS = P * (dP - delta) + P * dlse
        delta = delta - jnp.pad(dlse, ((0, 0), (0, 0), (0, padded - p.q_len)))
    return [delta, *others]


def after(spec: Any, which: str, sums: Array, like: Array, scale: float) -> Array:
    """Return float32 sums times `scale`, as a gradient in the shape and dtype of `like`."""
    lib = library.kernels()
    return _call(
        _hopper().run_after,
        _like(like.shape, like.dtype),
        *(_plain(spec), which, float(scale), sums),
        in_specs=[lib._F32_SPEC],
        out_specs=lib._QKV_SPEC,
        name=f"maxattn_backward_after_{which}",
    )


def _plain(spec: Spec) -> Spec:
    """Return the spec for the kernels before and after a backward."""
    return Spec(spec.dtype, spec.head_dim, 1, spec.scale, spec.tile, KernelKind(Uniform()))


class Fa4DqAccumulator(DqAccumulator):
    """Add up dQ over several blocks of keys in one float32 array.

    A block's K and V are one packed array, and so are dK and dV: the kernel reads and writes these
    arrays without a copy. The kernels before and after a backward run once for all blocks.

    Args:
        p, launch: the problem and the launch of the backward over one block.
        inputs: the local queries; keys and values are not read.
        rows: output, LSE and their gradients.
        scale: multiplies the scores.
    """

    def __init__(self, p: Problem, launch: Launch, inputs: Inputs, rows: Rows, scale: float):
        q = inputs.q
        self._q, self._dout = own_array(q), own_array(rows.dout.astype(q.dtype))
        shape = str(q.dtype), p.head_dim, 1, float(scale), launch.tile
        self._spec = Spec(*shape, KernelKind(Uniform()))
        # Queries that padding added have an LSE of -inf and no gradient.
        lse = jnp.where(rows.lse == NEG_INF, BIG_LSE, rows.lse)
        given = rows.out.astype(q.dtype), self._dout, lse
        self.state: Any = before(self._spec, p, given, None, zeros=True)

    def add(self, keys: Packed, key_range: KeyRange = WHOLE, grads: Packed | None = None) -> Packed:
        """Add a range of a block's keys to dQ, and write its (dk, dv) into `grads` or a new array.

        The arguments are those of `DqAccumulator.add`.
        """
        hopper, lib, (delta, lse, dq) = _hopper(), library.kernels(), self.state
        sums = (dq,) if grads is None else (dq, grads)
        operands = BackwardOperands(*(self._q, keys, None, self._dout, lse, delta), sums=sums)
        packed = import_module("cutejax").ArraySpec(static_dims=(3, 4))
        dq, found = _call(
            hopper.run_block,
            [_like(dq.shape), _like(keys.shape, keys.dtype)],
            *(self._spec, operands, key_range),
            in_specs=[lib._QKV_SPEC, packed, lib._QKV_SPEC]
            + [lib._F32_SPEC] * 3
            + [packed] * (len(sums) - 1),
            out_specs=[lib._F32_SPEC, packed],
            input_output_aliases={_place(operands, "sums") + n: n for n in range(len(sums))},
            name="maxattn_backward_block",
        )
        self.state = [delta, lse, dq]
        return found

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in q's dtype."""
        return after(self._spec, "dq", self.state[2], self._q, self._spec.scale)


def can_add_up(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Return whether dQ of several blocks of keys can be summed in one array."""
    return heads == kv_heads and head_dim % 8 == 0 and kernel_width(head_dim) == head_dim
