"""Counts the grid steps of the TPU kernels under a mask, and the steps that compute a tile."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from maxattn.block_sizes.estimated.step_cost import Evaluates, Kind, StepGrid, Tile
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.masks import Mask, blocks
from maxattn.masks.terms import packed_interval


def hides_by_interval(call: Call) -> bool:
    """Check whether a call's mask hides keys that are not padding."""
    return not call.mask.is_full and call.mask.key_limit() is None


def evaluates(call: Call, tile: Tile) -> Evaluates:
    """Return which test of the mask the kernels evaluate with a given tile."""
    if hides_by_interval(call):
        return Evaluates.INTERVAL
    has_padding = bool(call.kv_len % tile[1]) or not call.mask.is_full
    return Evaluates.PADDING if has_padding else Evaluates.NOTHING


def not_priced(call: Call) -> str:
    """Return why no schedule can time a call; "" if a schedule may."""
    mask = call.mask
    if call.bias is not None:
        return "the schedules are for calls without a bias"
    if mask.is_full or (not mask.has_data and mask.key_limit() is not None):
        return ""
    if mask.has_data:
        return "only the device knows which tiles the mask's arrays leave empty"
    if call.sharded:
        return f"under {mask} the devices compute different tiles"
    if packed_interval(mask, call.kv_len) is None:
        return f"the schedules are for one interval of keys per query, and {mask} has more"
    return ""


@lru_cache(maxsize=4096)
def step_grid(kind: Kind, tile: Tile, call: Call, kernel: KernelKind) -> StepGrid | None:
    """Return a kernel's grid; None if one tile has all queries or keys: another schedule."""
    heads, by_key = call.batch * call.heads, kind in ("dkv", "fused")
    rows, columns = -(-call.q_len // tile[0]), -(-call.kv_len // tile[1])
    if min(rows, columns) < 2:
        return None
    if evaluates(call, tile) != Evaluates.INTERVAL:
        share = evaluates(call, tile) / columns
        sides = (columns, rows) if by_key else (rows, columns)
        return StepGrid(heads, *sides, share)
    tiles = _visited(call.mask, tile[0], tile[1], call.q_len, call.kv_len)
    per_row = tiles.by_key if by_key else tiles.by_row
    # tokamax's grid has only visited tiles. Other grids are as wide as their longest row; the fused
    # backward of JAX's kernel has all steps, since each writes a partial dQ.
    if kernel == "tokamax_flash":
        steps = max(1.0, float(per_row.sum())) / per_row.size
    elif kernel == "flash" and kind == "fused":
        steps = float(rows)
    else:
        steps = float(max(1, per_row.max()))
    every, count = per_row.size * steps, int(tiles.by_row.sum())
    masked, idle = (count - tiles.whole) / every, 1.0 - count / every
    return StepGrid(heads, per_row.size, steps, float(masked), float(idle))


def tile_shares(call: Call, tile: Tile) -> tuple[float, float]:
    """Return the shares of a call's tiles that are computed without and with a mask test."""
    tiles = _visited(call.mask, tile[0], tile[1], call.q_len, call.kv_len)
    every, count = tiles.by_row.size * tiles.by_key.size, int(tiles.by_row.sum())
    return tiles.whole / every, (count - tiles.whole) / every


class _Visited(NamedTuple):
    """Visited tiles per query tile and per key tile; `whole` of them have no mask test."""

    by_row: Int[np.ndarray, " rows"]
    by_key: Int[np.ndarray, " columns"]
    whole: int


@lru_cache(maxsize=1024)
def _visited(mask: Mask, block_q: int, block_kv: int, q_len: int, kv_len: int) -> _Visited:
    sizes = block_q, block_kv, q_len, kv_len
    rows, columns = -(-q_len // block_q), -(-kv_len // block_kv)
    found = blocks.stretches(mask, *sizes)
    by_row = np.zeros(rows, np.int64)
    np.add.at(by_row, found.row, found.end - found.start)
    ends = np.zeros(columns + 1, np.int64)
    np.add.at(ends, found.start, 1)
    np.add.at(ends, found.end, -1)
    whole = blocks.whole_stretches(mask, *sizes)
    padded = columns - 1 if kv_len % block_kv else columns  # the last key tile has padding
    counts = (whole.end - whole.start)[whole.start < padded]
    return _Visited(by_row, np.cumsum(ends)[:-1], int(counts.sum()))
