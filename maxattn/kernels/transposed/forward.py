"""The forward kernel on one batch row: its operands, its grid, and what a step does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.block_sizes.sizes import LANES
from maxattn.kernels.splash.calls import Blocks, Operands, Setup
from maxattn.kernels.splash.tokamax import WHOLE
from maxattn.kernels.transposed import tile
from maxattn.kernels.transposed.score_bound import small_scores
from maxattn.kernels.transposed.steps import Steps, marks_of_ids, steps_of

NAME = "tpu_flash_fwd"
LN2 = 0.6931471805599453


class Operand(NamedTuple):
    """Hold an array that the kernel reads, under a name, and how its blocks are laid out."""

    name: str
    array: Array
    spec: Any


def forward(
    row: Operands, setup: Setup, blocks: Blocks, interpret: bool, v_is_turned: bool
) -> tuple[Array, Array]:
    """Return (out [N, T, H], lse [N, T] float32, natural) of queries that log2(e) multiplied.

    Args:
        row: the operands.
        setup: the mask.
        blocks: queries and keys of a tile, and keys computed at once.
        interpret: run in Pallas' interpreter.
        v_is_turned: transpose V before the kernel, not inside.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    block_q, block_kv, _ = blocks
    (heads, t, h), s = row.q.shape, row.k.shape[1]
    steps = steps_of(setup)
    operands = _operands(row, setup, steps, blocks, v_is_turned)
    grid = heads, t // block_q, s // block_kv if steps is None else steps.count
    lists = () if steps is None else (steps.block, steps.mark)
    out, lse = pl.pallas_call(
        partial(
            _kernel,
            tuple(x.name for x in operands),
            KernelForm.of(setup, steps, blocks, v_is_turned),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=grid,
            in_specs=[x.spec for x in operands],
            out_specs=[
                pl.BlockSpec((None, block_q, h), lambda n, i, j, *_: (n, i, 0)),
                pl.BlockSpec((None, 1, block_q), lambda n, i, j, *_: (n, 0, i)),
            ],
            scratch_shapes=[pltpu.VMEM((rows, block_q), jnp.float32) for rows in (h, 8, 1)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((heads, t, h), row.q.dtype),
            jax.ShapeDtypeStruct((heads, 1, t), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=_cost(row, grid, blocks),
        interpret=interpret,
        name=NAME,
    )(*lists, *(x.array for x in operands))
    return out, lse[:, 0] * LN2


class KernelForm(NamedTuple):
    """Hold what the kernel's code depends on.

    Args:
        blocks: queries and keys of a tile, and keys computed at once.
        count: steps of a row of tiles where they are listed, else 0.
        code: tells from codes of queries and indexes of keys which pairs attend, or None.
        columns: blocks of keys where segment ids mark tiles, else 0.
        v_is_turned: V is [H, keys], else [keys, H].
    """

    blocks: Blocks
    count: int
    code: Callable[..., Any] | None
    columns: int
    v_is_turned: bool

    @staticmethod
    def of(setup: Setup, steps: Steps | None, blocks: Blocks, v_is_turned: bool) -> KernelForm:
        """Read off the mask."""
        columns = 0 if setup.ids is None else setup.padded[1] // blocks[1]
        count = 0 if steps is None else steps.count
        return KernelForm(blocks, count, setup.code, columns, v_is_turned)


# ---- operands ------------------------------------------------------------------------------------


def _operands(
    row: Operands, setup: Setup, steps: Steps | None, blocks: Blocks, v_is_turned: bool
) -> list[Operand]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    block_q, block_kv, _ = blocks
    h, group = row.q.shape[2], row.q.shape[0] // row.k.shape[0]
    key_head = partial(_key_head, group)
    column = partial(_column, 0 if steps is None else steps.count)
    of_queries = pl.BlockSpec((1, block_q), lambda n, i, j, *_: (0, i))
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    upright = pl.BlockSpec(
        (None, block_kv, h), lambda n, i, j, *s: (key_head(n), column(i, j, *s), 0)
    )
    turned = pl.BlockSpec(
        (None, h, block_kv), lambda n, i, j, *s: (key_head(n), 0, column(i, j, *s))
    )
    v = (row.v.swapaxes(1, 2), turned) if v_is_turned else (row.v, upright)
    found = [
        Operand("q", row.q, pl.BlockSpec((None, block_q, h), lambda n, i, j, *_: (n, i, 0))),
        Operand("k", row.k, upright),
        Operand("v", *v),
        Operand("bounded", small_scores(row.q, row.k, row.v, block_q), scalars),
    ]
    if setup.codes is not None:
        found.append(Operand("codes", setup.codes.padded(setup.padded[0])[None], of_queries))
    if row.ids is not None:
        q_ids, kv_ids = row.ids
        of_keys = pl.BlockSpec((1, block_kv), lambda n, i, j, *s: (0, column(i, j, *s)))
        marks = marks_of_ids(q_ids, kv_ids, block_q, block_kv)
        found += [
            Operand("q_ids", q_ids[None], of_queries),
            Operand("kv_ids", kv_ids[None], of_keys),
            Operand("marks", marks, scalars),
        ]
    return found


def _key_head(group: int, n: Any) -> Any:
    # Not `//`, whose lowering asks for the sign and with it for a TPU that is there.
    return n if group == 1 else jax.lax.div(n, jnp.int32(group))


def _column(count: int, i: Any, j: Any, block: Any = None, mark: Any = None) -> Any:
    """Return the block of keys of a step."""
    return j if block is None else block[i * count + j]


def _cost(row: Operands, grid: tuple[int, int, int], blocks: Blocks) -> Any:
    from jax.experimental import pallas as pl

    pairs = grid[0] * grid[1] * grid[2] * blocks[0] * blocks[1]
    h, size = row.q.shape[2], row.q.dtype.itemsize
    keys = 2 * grid[0] * grid[1] * grid[2] * blocks[1] * h * size
    return pl.CostEstimate(
        flops=4 * pairs * h, transcendentals=pairs, bytes_accessed=keys + 2 * row.q.size * size
    )


# ---- one step ------------------------------------------------------------------------------------


def _kernel(names: tuple[str, ...], form: KernelForm, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    n, i, j = (pl.program_id(axis) for axis in range(3))
    rows, steps = pl.num_programs(1), pl.num_programs(2)
    lists, refs = (refs[:2], refs[2:]) if form.count else ((), refs)
    read = dict(zip(names, refs, strict=False))
    out, lse, *scratch = refs[len(names) :]
    sums = tile.Sums(*scratch)
    bounded = read["bounded"][0, n * rows + i] == 1
    block = _column(form.count, i, j, *lists)
    mark = lists[1][i * form.count + j] if lists else WHOLE
    if form.columns:
        mark = jnp.minimum(mark, read["marks"][0, i * form.columns + block])
    masks = form.code is not None or bool(form.columns)

    @pl.when(j == 0)
    def _() -> None:
        sums.clear(bounded)

    @pl.when(bounded & (mark == WHOLE))
    def _() -> None:
        _add(tile.add_bounded, sums, read, form, None)

    if masks:

        @pl.when(bounded & (mark != WHOLE) & (mark != 0))
        def _() -> None:
            _add(tile.add_bounded, sums, read, form, block)

    @pl.when(jnp.logical_not(bounded) & (mark != 0))
    def _() -> None:
        _add(tile.add_online, sums, read, form, block if masks else None)

    @pl.when(j == steps - 1)
    def _() -> None:
        acc, base2 = sums.result()
        out[...] = acc.T.astype(out.dtype)
        lse[...] = base2


def _add(
    add: Callable[..., None], sums: tile.Sums, read: Any, form: KernelForm, block: Any
) -> None:
    """Go through the keys of a tile; `block` is theirs where the mask is evaluated, else None."""
    _, block_kv, compute = form.blocks
    for start in range(0, block_kv, compute):
        keys = slice(start, min(start + compute, block_kv))
        s = tile.scores(read["k"][keys, :], read["q"][...])
        if block is not None:
            s = tile.hide(s, _allowed(s.shape, read, form, keys, block))
        add(sums, s, tile.Values(read["v"], keys.start, form.v_is_turned))


def _allowed(shape: tuple[int, ...], read: Any, form: KernelForm, keys: slice, block: Any) -> Array:
    """Evaluate the mask for some keys of a block, [keys, block_q]."""
    found = None
    if form.code is not None:
        index = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + (
            block * form.blocks[1] + keys.start
        )
        found = form.code(jnp.broadcast_to(read["codes"][...], shape), index)
    if form.columns:
        lanes = jnp.broadcast_to(read["kv_ids"][:, keys], (LANES, shape[0])).T
        same = jnp.broadcast_to(lanes[:, :1], shape) == read["q_ids"][...]
        found = same if found is None else found & same
    assert found is not None
    return found
