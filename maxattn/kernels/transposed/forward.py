"""The forward kernel of `tpu_flash` on one batch row: its operands, its grid, and one step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.softmax import LN2
from maxattn.kernels.splash.calls import Blocks, Operands, Setup
from maxattn.kernels.splash.tokamax import WHOLE
from maxattn.kernels.transposed import tile
from maxattn.kernels.transposed.steps import (
    GridSteps,
    KernelForm,
    Operand,
    allowed,
    listed_block,
    marks_of_ids,
    steps_of,
)

NAME = "tpu_flash_fwd"


def forward(
    row: Operands, setup: Setup, blocks: Blocks, interpret: bool, v_is_turned: bool
) -> tuple[Array, Array]:
    """Return (out [N, T, H], natural lse [N, T] float32).

    Args:
        row: the operands of one batch row; queries are multiplied by log2(e).
        setup: the mask.
        blocks: numbers of queries and keys in a tile, and of keys computed at once.
        interpret: whether to run in Pallas' interpreter.
        v_is_turned: whether V is transposed before the kernel instead of inside it.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    block_q, block_kv, _ = blocks
    (heads, t, h), s = row.q.shape, row.k.shape[1]
    steps = steps_of(setup)
    operands = _operands(row, setup, steps, blocks, v_is_turned)
    grid = heads, t // block_q, s // block_kv if steps is None else steps.count
    lists = () if steps is None else (steps.block, steps.mark)
    form, names = KernelForm.of(setup, steps, blocks), tuple(x.name for x in operands)
    tiles, size = grid[0] * grid[1] * grid[2], row.q.dtype.itemsize
    pairs, keys = tiles * block_q * block_kv, 2 * tiles * block_kv * h * size
    cost = pl.CostEstimate(
        flops=4 * pairs * h, transcendentals=pairs, bytes_accessed=keys + 2 * row.q.size * size
    )
    out, lse = pl.pallas_call(
        partial(_kernel, names, form, v_is_turned),
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
        cost_estimate=cost,
        interpret=interpret,
        name=NAME,
    )(*lists, *(x.array for x in operands))
    return out, lse[:, 0] * LN2


def _operands(
    row: Operands, setup: Setup, steps: GridSteps | None, blocks: Blocks, v_is_turned: bool
) -> list[Operand]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    block_q, block_kv, _ = blocks
    h, group = row.q.shape[2], row.q.shape[0] // row.k.shape[0]
    column = partial(listed_block, 0 if steps is None else steps.count)

    def key_head(n: Any) -> Any:
        # Not `//`: jax lowers it through `sign`, which looks up this machine's TPU.
        return n if group == 1 else jax.lax.div(n, jnp.int32(group))

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
        Operand("bounded", tile.small_scores(row.q, row.k, row.v, block_q), scalars),
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


# ---- one step ------------------------------------------------------------------------------------


def _kernel(names: tuple[str, ...], form: KernelForm, v_is_turned: bool, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    n, i, j = (pl.program_id(axis) for axis in range(3))
    rows, steps = pl.num_programs(1), pl.num_programs(2)
    lists, refs = (refs[:2], refs[2:]) if form.count else ((), refs)
    read = dict(zip(names, refs, strict=False))
    out, lse, *scratch = refs[len(names) :]
    sums = tile.Sums(*scratch)
    bounded = read["bounded"][0, n * rows + i] == 1
    block = listed_block(form.count, i, j, *lists)
    mark = lists[1][i * form.count + j] if lists else WHOLE
    if form.columns:
        mark = jnp.minimum(mark, read["marks"][0, i * form.columns + block])

    @pl.when(j == 0)
    def _() -> None:
        sums.clear(bounded)

    # Keep the bodies with and without the mask adjacent: estimates of schedules need this order.
    for runs, add in ((bounded, tile.add_bounded), (jnp.logical_not(bounded), tile.add_online)):
        body = partial(_add, v_is_turned, add, sums, read, form)
        pl.when(runs & (mark == WHOLE))(partial(body, None))
        if form.masks:
            pl.when(runs & (mark != WHOLE) & (mark != 0))(partial(body, block))

    @pl.when(j == steps - 1)
    def _() -> None:
        acc, base2 = sums.result()
        out[...] = acc.T.astype(out.dtype)
        lse[...] = base2


def _add(
    v_is_turned: bool,
    add: Callable[..., None],
    sums: tile.Sums,
    read: Any,
    form: KernelForm,
    block: Any,
) -> None:
    """Add a tile to the sums; `block` is the key block if the mask is evaluated, else None."""
    for keys in form.parts():
        s = tile.scores(read["k"][keys, :], read["q"][...])
        if block is not None:
            s = tile.hide(s, allowed(s.shape, read, form, keys, block))
        add(sums, s, tile.Values(read["v"], keys.start, v_is_turned))
