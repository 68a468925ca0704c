"""The mask in both kernels of `tpu_flash`: the tiles that a grid visits, and the allowed pairs.

A mask's positions give the list of steps of each tile row; segment ids mark tiles on the device.
An empty tile has mark 0, a full tile WHOLE, and a tile in which the mask is tested PARTIAL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from maxattn.block_sizes.sizes import LANES
from maxattn.kernels.splash.calls import Blocks, Setup
from maxattn.kernels.splash.mask_info import schedule
from maxattn.kernels.splash.tokamax import PARTIAL, WHOLE, marks_of


class GridSteps(NamedTuple):
    """The steps of the grid, tile row by tile row."""

    # [tile rows * count], the key block of each step; with `by_key`, the query block
    block: Int[Array, " rows*count"]
    # [tile rows * count], the mark of each step's tile; 0 if the step computes nothing
    mark: Int[Array, " rows*count"]
    count: int  # number of steps per tile row


def steps_of(setup: Setup, by_key: bool = False) -> GridSteps | None:
    """List the non-empty tiles by query tile, or `by_key` by key tile; None if all are full."""
    marks = marks_of(setup).T if by_key else marks_of(setup)
    traced = not isinstance(marks, np.ndarray)
    if not traced and bool((marks == WHOLE).all()):
        return None
    xp: Any = jnp if traced else np
    block, runs = schedule(marks != 0, shrink=True)
    mark = xp.take_along_axis(marks, block.astype(np.int32), axis=1) * runs
    flat = (jnp.asarray(x, jnp.int32).reshape(-1) for x in (block, mark))
    return GridSteps(*flat, count=block.shape[1])


def marks_of_ids(
    q_ids: Int[Array, " T"], kv_ids: Int[Array, " S"], block_q: int, block_kv: int
) -> Int[Array, "1 tiles"]:
    """Mark each tile by its queries' and keys' id ranges: 0 if disjoint, WHOLE if one equal id."""
    queries, keys = q_ids.reshape(-1, block_q), kv_ids.reshape(-1, block_kv)
    q_low, q_high = (f(queries, axis=1)[:, None] for f in (jnp.min, jnp.max))
    k_low, k_high = (f(keys, axis=1)[None] for f in (jnp.min, jnp.max))
    meet = (q_low <= k_high) & (k_low <= q_high)
    same = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    marks = jnp.where(same, WHOLE, jnp.where(meet, PARTIAL, 0))
    return marks.astype(jnp.int32).reshape(1, -1)


class Operand(NamedTuple):
    """An array that a kernel reads, its name, and the layout of its blocks."""

    name: str
    array: Array
    spec: Any


class KernelForm(NamedTuple):
    """The static arguments of a kernel's code."""

    blocks: Blocks  # numbers of queries and keys in a tile, and of keys computed at once
    count: int  # number of steps per tile row if the steps are listed, else 0
    # the mask function of query codes and key indexes; None if every pair is allowed
    code: Callable[..., Any] | None
    columns: int  # number of key blocks if segment ids mark tiles, else 0

    @staticmethod
    def of(setup: Setup, steps: GridSteps | None, blocks: Blocks) -> KernelForm:
        columns = 0 if setup.ids is None else setup.padded[1] // blocks[1]
        return KernelForm(blocks, 0 if steps is None else steps.count, setup.code, columns)

    @property
    def masks(self) -> bool:
        """Whether any tile may evaluate the mask."""
        return self.code is not None or bool(self.columns)

    def parts(self) -> list[slice]:
        """Cut the keys of a tile into parts computed at once; the last part may be shorter."""
        _, block_kv, compute = self.blocks
        return [slice(n, min(n + compute, block_kv)) for n in range(0, block_kv, compute)]


def listed_block(count: int, row: Any, step: Any, block: Any = None, mark: Any = None) -> Any:
    """Return the block that a step visits, from the list of steps; without a list, `step`."""
    return step if block is None else block[row * count + step]


def allowed(shape: tuple[int, ...], read: Any, form: KernelForm, keys: slice, block: Any) -> Array:
    """Evaluate the mask for some keys of the key block, in the shape [keys, block_q]."""
    found = None
    if form.code is not None:
        first = block * form.blocks[1] + keys.start
        index = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + first
        found = form.code(jnp.broadcast_to(read["codes"][...], shape), index)
    if form.columns:
        lanes = jnp.broadcast_to(read["kv_ids"][:, keys], (LANES, shape[0])).T
        same = jnp.broadcast_to(lanes[:, :1], shape) == read["q_ids"][...]
        found = same if found is None else found & same
    assert found is not None
    return found
