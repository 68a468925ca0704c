"""The backward kernel of `tpu_flash`: dQ, dK and dV in one pass over the tiles.

For each key block, the grid visits the query blocks, so that dK and dV are summed in VMEM. dQ is
summed in one float32 array in HBM, one query block per step (`HbmSum`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.softmax import LOG2E
from maxattn.kernels.splash import scalar_memory
from maxattn.kernels.splash.calls import Blocks, Operands, Setup, Stats
from maxattn.kernels.splash.tokamax import WHOLE
from maxattn.kernels.transposed.backward_tile import Gradients, HbmSum, Queries, add_keys, weights
from maxattn.kernels.transposed.steps import (
    GridSteps,
    KernelForm,
    Operand,
    allowed,
    listed_block,
    marks_of_ids,
    steps_of,
)

NAME = "tpu_flash_dkv"


def backward(
    rows: Operands, stats: Stats, setup: Setup, blocks: Blocks, interpret: bool
) -> tuple[Array, Array, Array]:
    """Return (dq [B, N, T, H], dk, dv [B, K, S, H]), float32, for all batch rows.

    Args:
        rows: the operands; queries are multiplied by log2(e), and dk then contains that factor.
        stats: the statistics of each query, with a natural-log LSE.
        setup: the mask.
        blocks: numbers of queries and keys in a tile, and of keys computed at once.
        interpret: whether to run in Pallas' interpreter.
    """
    steps = steps_of(setup, by_key=True)
    form = _BackwardForm.of(rows, setup, steps, blocks)
    if not interpret:
        marks = form.tiles.columns * (rows.q.shape[2] // blocks[0])
        listed = 0 if steps is None else steps.block.shape[0]
        rule = scalar_memory.too_long(scalar_memory.words_bytes(listed, marks))
        if rule is not None:
            raise scalar_memory.unsupported(blocks, rule)
    operands = _operands(rows, stats, setup, form)
    lists = () if steps is None else (steps.block, steps.mark)

    # Pallas cannot batch blocks of an array in HBM, so a surrounding `vmap` becomes a loop.
    @jax.custom_batching.sequential_vmap
    def run(*arrays: Array) -> Any:
        return _call(form, operands, len(lists), interpret)(*arrays)

    b, n, t, h = rows.q.shape
    zeros = jnp.zeros((b * n, h, t), jnp.float32)
    dq, dk, dv = run(*lists, *(x.array for x in operands), zeros)
    shape = rows.k.shape
    return dq.swapaxes(1, 2).reshape(b, n, t, h), dk.reshape(shape), dv.reshape(shape)


class _BackwardForm(NamedTuple):
    # the arguments that the forward has too; `count` is the number of steps per key block
    tiles: KernelForm
    # (key heads of all batch rows, key blocks of a head, steps per query head)
    grid: tuple[int, int, int]
    heads: int  # number of key heads of a batch row
    group: int  # number of query heads that share a key head
    # q, k: the shapes [heads, T, H] and [heads, S, H], for all batch rows
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    dtype: Any  # the dtype of the operands

    @staticmethod
    def of(rows: Operands, setup: Setup, steps: GridSteps | None, blocks: Blocks) -> _BackwardForm:
        (b, n, t, h), (_, heads, s, _) = rows.q.shape, rows.k.shape
        form = KernelForm.of(setup, steps, blocks)
        grid = b * heads, s // blocks[1], form.count or t // blocks[0]
        shapes = (b * n, t, h), (b * heads, s, h)
        return _BackwardForm(form, grid, heads, n // heads, *shapes, rows.q.dtype)

    def head_and_block(self, n: Any, j: Any, i: Any, *lists: Any) -> tuple[Any, Any]:
        """Return the query head and the query block of a step."""
        step, head = i, n
        if self.group > 1:
            count = jnp.int32(self.grid[2])
            step, head = jax.lax.rem(i, count), n * self.group + jax.lax.div(i, count)
        return head, listed_block(self.tiles.count, j, step, *lists)

    def row(self, n: Any) -> Any:
        return n if self.heads == 1 else jax.lax.div(n, jnp.int32(self.heads))


# ---- operands ------------------------------------------------------------------------------------


def _operands(rows: Operands, stats: Stats, setup: Setup, form: _BackwardForm) -> list[Operand]:
    """List the operands; query arrays are transposed, so that tokens are along the lanes."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (heads, t, h), (block_q, block_kv, _) = form.q, form.tiles.blocks

    def queries(*i: Any) -> Any:
        return form.head_and_block(*i)[1]

    def of_queries(height: int) -> Any:
        def index(*i: Any) -> tuple[Any, Any, Any]:
            head, block = form.head_and_block(*i)
            return head, 0, block

        return pl.BlockSpec((None, height, block_q), index)

    def of_row(size: int, block: Any, **memory: Any) -> Any:
        return pl.BlockSpec((None, 1, size), lambda n, *i: (form.row(n), 0, block(n, *i)), **memory)

    across, line, of_keys = of_queries(h), of_queries(1), _of_keys(form)
    found = [
        Operand("q", rows.q.reshape(form.q).swapaxes(1, 2), across),
        Operand("k", rows.k.reshape(form.k), of_keys),
        Operand("v", rows.v.reshape(form.k), of_keys),
        Operand("dout", stats.dout.reshape(form.q).swapaxes(1, 2), across),
        Operand("lse", (stats.lse * LOG2E).reshape(heads, 1, t), line),
        Operand("delta", stats.delta.reshape(heads, 1, t), line),
    ]
    if setup.codes is not None:
        spec = pl.BlockSpec((1, block_q), lambda *i: (0, queries(*i)))
        found.append(Operand("codes", setup.codes.padded(setup.padded[0])[None], spec))
    if rows.ids is not None:
        q_ids, kv_ids = rows.ids
        marks = jax.vmap(partial(marks_of_ids, block_q=block_q, block_kv=block_kv))(q_ids, kv_ids)
        all_of_them = of_row(marks.shape[2], lambda *_: 0, memory_space=pltpu.SMEM)
        found += [
            Operand("q_ids", q_ids[:, None], of_row(block_q, queries)),
            Operand("kv_ids", kv_ids[:, None], of_row(block_kv, lambda n, j, *_: j)),
            Operand("marks", marks, all_of_them),
        ]
    return found


def _of_keys(form: _BackwardForm) -> Any:
    from jax.experimental import pallas as pl

    return pl.BlockSpec((None, form.tiles.blocks[1], form.k[2]), lambda n, j, *_: (n, j, 0))


def _call(form: _BackwardForm, operands: list[Operand], lists: int, interpret: bool) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (block_q, block_kv, _), (heads, t, h) = form.tiles.blocks, form.q
    # Place dQ in HBM explicitly: the compiler would put a short dQ into VMEM, beside its blocks.
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    n, rows, steps = form.grid
    float32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    tiles, size = n * rows * steps * form.group, jnp.dtype(form.dtype).itemsize
    pairs, keys = tiles * block_q * block_kv, n * rows * block_kv
    moved = tiles * block_q * h * (2 * size + 8) + keys * h * (2 * size + 8)
    cost = pl.CostEstimate(flops=10 * pairs * h, transcendentals=pairs, bytes_accessed=moved)
    return pl.pallas_call(
        partial(_kernel, tuple(x.name for x in operands), form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=lists,
            grid=(n, rows, form.group * steps),
            in_specs=[*(x.spec for x in operands), in_hbm],
            out_specs=[in_hbm, _of_keys(form), _of_keys(form)],
            scratch_shapes=[
                *(pltpu.VMEM((h, block_kv), dtype) for dtype in (jnp.float32,) * 2),
                # XLA on a CPU cannot multiply bfloat16 arrays whose layout is transposed.
                pltpu.VMEM((h, block_kv), jnp.float32 if interpret else form.dtype),
                *(pltpu.VMEM((h, block_q), jnp.float32) for _ in range(2)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[float32((heads, h, t)), float32(form.k), float32(form.k)],
        input_output_aliases={lists + len(operands): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=NAME,
    )


# ---- one step ------------------------------------------------------------------------------------


def _kernel(names: tuple[str, ...], form: _BackwardForm, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    n, j, i = (pl.program_id(axis) for axis in range(3))
    lists, refs = (refs[:2], refs[2:]) if form.tiles.count else ((), refs)
    read = dict(zip(names, refs, strict=False))
    _, dq, dk, dv, *scratch = refs[len(names) :]
    sums, whole = Gradients(*scratch[:3]), HbmSum(dq, *scratch[3:])
    head, block = form.head_and_block(n, j, i, *lists)
    last, mark = pl.num_programs(2) - 1, WHOLE
    if lists:
        step = i if form.group == 1 else jax.lax.rem(i, jnp.int32(form.grid[2]))
        mark = lists[1][j * form.tiles.count + step]
    if form.tiles.columns:
        mark = jnp.minimum(mark, read["marks"][0, block * form.tiles.columns + j])

    @pl.when((j == 0) & (i == 0))
    def _() -> None:
        whole.begin()

    @pl.when(i == 0)
    def _() -> None:
        sums.clear(read["k"][...])

    def add(key_block: Any) -> None:
        whole.add(head, block, _tile(sums, read, form.tiles, key_block))

    @pl.when(mark != 0)
    def _() -> None:
        whole.fetch(head, block)

    @pl.when(mark == WHOLE)
    def _() -> None:
        add(None)

    if form.tiles.masks:

        @pl.when((mark != WHOLE) & (mark != 0))
        def _() -> None:
            add(j)

    @pl.when(i == last)
    def _() -> None:
        dk[...], dv[...] = sums.dk[...].T, sums.dv[...].T

    @pl.when((j == pl.num_programs(1) - 1) & (i == last))
    def _() -> None:
        whole.end()


def _tile(sums: Gradients, read: Any, form: KernelForm, block: Any) -> Array:
    """Add a tile to dK and dV, and return its dQ^T; if `block` is None, no mask is tested."""
    queries = Queries(*(read[name][...] for name in ("q", "dout", "lse", "delta")))
    total = jnp.zeros(queries.q.shape, jnp.float32)
    for keys in form.parts():
        k, shape = read["k"][keys, :], (keys.stop - keys.start, queries.q.shape[1])
        visible = None if block is None else allowed(shape, read, form, keys, block)
        p = weights(k, queries, visible)
        total = total + add_keys(sums, keys, read["v"][keys, :], p, queries)
    return total
