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
from jaxtyping import Array

from maxattn.kernels.base import WHOLE, DqAccumulator, Grads, Inputs, KeyRange, Packed, Result, Rows
from maxattn.kernels.fa4 import library
from maxattn.kernels.fa4.launch import Launch
from maxattn.kernels.fa4.library import KernelArrays, Spec
from maxattn.kernels.fa4.lists import Masked
from maxattn.kernels.fa4.problem import Problem
from maxattn.kernels.fa4.tiles import kernel_width, sums_width
from maxattn.kernels.fa4.work import ALL, items
from maxattn.kernels.softmax import NEG_INF, finite, merge_by_lse


def _call(run: str, results: KernelArrays, given: KernelArrays, *settings: Any, name: str) -> Any:
    """Call a function of hopper.py; a result that shares an operand's name replaces the operand."""
    function = getattr(import_module("maxattn.kernels.fa4.hopper"), run)  # imports CuTe
    read, written = _named(given), _named(results)
    places = {x: at for at, (x, _) in enumerate(read)}
    (made,) = import_module("cutejax").call(
        *(function, [results], *settings, given),
        in_specs=[_layout(x, array.dtype) for x, array in read],
        out_specs=[_layout(x, array.dtype) for x, array in written],
        input_output_aliases={places[x]: at for at, (x, _) in enumerate(written) if x in places},
        vmap_method="sequential",
        name=f"maxattn_{name}",
    )
    return made


def _named(arrays: KernelArrays) -> list[tuple[str, Any]]:
    return [(x, each) for x, of in arrays._asdict().items() for each in jax.tree.leaves(of)]


def _layout(name: str, dtype: Any) -> Any:
    """Return cutejax's layout of an operand or result."""
    lib, layout = library.kernels(), import_module("cutejax").ArraySpec
    if name in ("block", "grads"):
        return layout(static_dims=(3, 4))
    if name in ("slots", "items"):
        return layout(static_dims=(2, 3) if name == "slots" else (1,), assumed_align=16)
    if name in ("lse", "slot_lse", "arrays") or dtype == jnp.int32:
        # Such an array is read element by element, so that a slice may begin at any element.
        return layout(assumed_align=dtype.itemsize)
    return lib._F32_SPEC if dtype == jnp.float32 else lib._QKV_SPEC


def _like(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# ---- forward -------------------------------------------------------------------------------------


def forward(
    p: Problem, launch: Launch, qkv: tuple[Array, ...], given: Masked, scale: float
) -> Result:
    """Return (out [B,T,N,H], lse [B,N,T]); `given` are the operands for the mask or the bias."""
    (tail, splits), tile, dtype = launch.cut, launch.tile.queries, qkv[0].dtype
    rows = -(-p.q_len // tile) if tail == ALL else tail
    slots, results = (splits * p.batch, rows * tile, p.heads), KernelArrays()
    if tail != ALL:
        lse = _like((p.batch, p.heads, p.q_len))
        results = results._replace(out=_like(qkv[0].shape, dtype), lse=lse)
    if tail:
        slot_lse = _like((slots[0], p.heads, slots[1]))
        out = _like((*slots, -(-p.head_dim // 16) * 16))
        results = results._replace(slots=out, slot_lse=slot_lse)
    operands = _operands(p, launch, qkv, given)
    if launch.queue:  # the kernel counts taken items in place
        operands = operands._replace(count=jnp.zeros(1, jnp.int32))
        results = results._replace(count=_like((1,), jnp.int32))
    spec = _spec(p, launch, dtype, given, scale)
    made = _call("run_forward", results, operands, spec, name="forward")
    if not tail:
        return _seen(Result(made.out, made.lse), given.lengths)
    # Without the barrier XLA (jax 0.11.2) would write one result of the call into another.
    made = jax.lax.optimization_barrier(made)
    first = (-(-p.q_len // tile) - rows) * tile
    left = p.q_len - first
    lse = made.slot_lse[:, :, :left]
    if given.lengths is not None:  # a merge ignores splits without real keys
        ends = jnp.arange(splits + 1)[:, None] * -(-given.lengths // launch.tile.keys) // splits
        lse = jnp.where((ends[1:] > ends[:-1]).reshape(-1)[:, None, None], lse, NEG_INF)
    split = (x.reshape(splits, p.batch, *x.shape[1:]) for x in (made.slots, lse))
    parts = zip(*split, strict=True)
    out, lse = merge_by_lse([(x[:, :left, :, : p.head_dim], y) for x, y in parts])
    last = out.astype(dtype), lse
    return _seen(Result(*_joined((made.out, made.lse), last, (1, 2), first)), given.lengths)


def _seen(result: Result, lengths: Array | None) -> Result:
    return result if lengths is None else result.where(lengths[:, None, None] > 0)


def _joined(whole: Any, last: Any, axes: tuple[int, int], start: int) -> Any:
    """Write the results of the last tile rows into `whole`, from index `start` on."""
    if not start:
        return last
    put = jax.lax.dynamic_update_slice_in_dim
    found = [put(x, part, start, axis) for x, part, axis in zip(whole, last, axes, strict=True)]
    # Without the barrier XLA keeps the values before the update too, and copies the whole result.
    return jax.lax.optimization_barrier(found)


def _spec(p: Problem, launch: Launch, dtype: Any, given: Masked, scale: float) -> Spec:
    shape = str(dtype), p.head_dim, p.heads // p.kv_heads, float(scale), launch.tile
    return Spec(*shape, launch.cut, p.sms if launch.queue else 0, given.test, p.bias)


def _operands(p: Problem, launch: Launch, qkv: tuple[Array, ...], given: Masked) -> KernelArrays:
    operands = KernelArrays(*qkv, lengths=given.lengths, arrays=given.arrays)
    if given.lists is None:
        return operands
    found = items(given.lists.work, (p.batch, p.heads), launch.group, launch.cut.splits)
    return operands._replace(lists=jnp.asarray(given.lists.array), items=jnp.asarray(found))


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
    """Return (dq, dk, dv) from a given output and LSE; `dlse` is the LSE's gradient, if any."""
    q, k, v, out, dout = (own_array(x) for x in (*qkv, rows.out, rows.dout))
    spec, (tail, splits), tile = _spec(p, launch, q.dtype, given, scale), launch.cut, launch.tile
    stats = before(spec, p, (out, dout, rows.lse), dlse, not launch.writes_first)
    shared, is_part = p.heads != p.kv_heads, tail not in (0, ALL)
    tiles, padded = -(-p.q_len // tile.queries), -(-p.kv_len // tile.keys) * tile.keys
    start = padded - tail * tile.keys if is_part else 0
    width = sums_width(p.head_dim)
    split = _like((splits * p.batch, p.kv_len - start, *k.shape[2:]), k.dtype)
    grad = _like((p.batch, p.kv_heads, padded * width)) if shared else split
    grad = _like(k.shape, k.dtype) if is_part else grad
    results = KernelArrays(
        dq=_like((p.batch, p.heads, tiles * tile.queries * width)), dk=grad, dv=grad
    )
    operands = _operands(p, launch, (q, k, v), given)._replace(dout=dout, **stats)
    if launch.writes_first:
        flags = jnp.zeros((p.batch, p.heads, tiles), jnp.int32)
        operands = operands._replace(flags=flags)
        results = results._replace(flags=_like(flags.shape, flags.dtype))
    if shared:
        dk, dv = (jnp.zeros(grad.shape, jnp.float32) for _ in range(2))
        operands = operands._replace(dk=dk, dv=dv)
    if is_part:
        results = results._replace(last_dk=split, last_dv=split)
    made = _call("run_backward", results, operands, spec, name="backward")
    dq = after(spec, "dq", made.dq, q, scale)
    if shared:
        dk = after(spec, "dkv", made.dk, k, scale)
        return Grads(dq, dk, after(spec, "dkv", made.dv, v, 1.0))
    if splits == 1:
        return Grads(dq, made.dk, made.dv)
    made = jax.lax.optimization_barrier(made._replace(dq=None, flags=None))
    last = (made.last_dk, made.last_dv) if is_part else (made.dk, made.dv)
    apart = (x.reshape(-1, p.batch, *x.shape[1:]).astype(jnp.float32) for x in last)
    summed = [x.sum(0).astype(k.dtype) for x in apart]
    return Grads(dq, *_joined((made.dk, made.dv), summed, (1, 1), start))


def own_array(x: Array) -> Array:
    """Return an operand of a backward as an array that is no slice of another.

    XLA passes slices to a custom call without a copy, but then forgets which results share the
    memory of which operands (jax 0.11.2): the float32 sums, which the kernel adds to in place,
    would begin as garbage.
    """
    return jax.lax.optimization_barrier(x)


def before(
    spec: Spec, p: Problem, rows: tuple[Array, Array, Array], dlse: Array | None, zeros: bool
) -> dict[str, Array]:
    """Return delta, the LSE in base 2 and, if `zeros`, a zeroed sum for dQ, by operand name.

    `rows` are out, dout and lse; `dlse` is the gradient of the LSE, if it has one.
    """
    tile = spec.tile[0]
    padded = -(-p.q_len // tile) * tile
    stats = _like((p.batch, p.heads, padded))
    dq = _like((p.batch, p.heads, padded * sums_width(p.head_dim))) if zeros else None
    given = KernelArrays(**dict(zip(("out", "dout", "lse"), rows, strict=True)))
    results, name = KernelArrays(delta=stats, lse2=stats, dq=dq), "backward_before"
    made = _call("run_before", results, given, _plain(spec), name=name)
    found = dict(_named(made))
    if dlse is not None:  # dS = P * (dP - delta) + P * dlse
        found["delta"] -= jnp.pad(dlse, ((0, 0), (0, 0), (0, padded - p.q_len)))
    return found


def after(spec: Spec, which: str, sums: Array, like: Array, scale: float) -> Array:
    """Return float32 sums times `scale`, as a gradient in the shape and dtype of `like`."""
    settings, result = (_plain(spec), which, float(scale)), _like(like.shape, like.dtype)
    arrays = KernelArrays(grad=result), KernelArrays(sums=sums)
    return _call("run_after", *arrays, *settings, name=f"backward_after_{which}").grad


def _plain(spec: Spec) -> Spec:
    """Return the spec for the kernels before and after a backward."""
    return Spec(spec.dtype, spec.head_dim, 1, spec.scale, spec.tile)


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
        self._spec = Spec(str(q.dtype), p.head_dim, 1, float(scale), launch.tile)
        # Queries that padding added have an LSE of -inf and no gradient.
        given = rows.out.astype(q.dtype), self._dout, finite(rows.lse)
        self.state: Any = before(self._spec, p, given, None, zeros=True)

    def add(self, keys: Packed, key_range: KeyRange = WHOLE, grads: Packed | None = None) -> Packed:
        """Add a range of keys to dQ, and write its (dk, dv), as `DqAccumulator.add`."""
        given = KernelArrays(self._q, block=keys, dout=self._dout, grads=grads, **self.state)
        dq = self.state["dq"]
        results = KernelArrays(dq=_like(dq.shape), grads=_like(keys.shape, keys.dtype))
        settings = self._spec, key_range
        made = _call("run_block", results, given, *settings, name="backward_block")
        self.state = self.state | {"dq": made.dq}
        return made.grads

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in q's dtype."""
        return after(self._spec, "dq", self.state["dq"], self._q, self._spec.scale)


def can_add_up(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Return whether dQ of several blocks of keys can be summed in one array."""
    return heads == kv_heads and head_dim % 8 == 0 and kernel_width(head_dim) == head_dim
