"""How a call's mask cuts the grids of the TPU kernels: steps, and which of them compute a tile."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from maxattn.block_sizes.estimated.step_cost import Evaluates, Kind, StepGrid, Tile
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.masks import EMPTY, FULL

WORD = 32  # bits, in which a kernel is handed both ends of a query's keys


def hides_by_interval(call: Call) -> bool:
    """Tell whether a call's mask hides more than padding."""
    return not call.mask.is_full and call.mask.key_limit() is None


def evaluates(call: Call, tile: Tile) -> Evaluates:
    """Tell what the kernels evaluate of a call's mask, with tiles of some sizes."""
    if hides_by_interval(call):
        return Evaluates.INTERVAL
    has_padding = bool(call.kv_len % tile[1]) or not call.mask.is_full
    return Evaluates.PADDING if has_padding else Evaluates.NOTHING


def not_priced(call: Call) -> str:
    """Say why no schedules tell how long a call takes; "" where they may."""
    mask = call.mask
    if call.bias is not None:
        return "they are of calls without a bias"
    if mask.is_full or (not mask.has_data and mask.key_limit() is not None):
        return ""
    if mask.has_data:
        return "only the device knows which tiles the arrays of a mask leave"
    if call.sharded:
        return f"which tiles a device computes under {mask} differs by its rank"
    if not is_one_interval(call):
        return f"they are of masks with one interval of keys a query, and {mask} has others"
    return ""


@lru_cache(maxsize=4096)
def step_grid(kind: Kind, tile: Tile, call: Call, kernel: KernelKind) -> StepGrid | None:
    """Cut a call into the steps of one kernel; None where a tile holds all queries or all keys.

    A grid with one tile of queries or of keys has another schedule.
    """
    heads, by_key = call.batch * call.heads, kind in ("dkv", "fused")
    rows, columns = -(-call.q_len // tile[0]), -(-call.kv_len // tile[1])
    if min(rows, columns) < 2:
        return None
    if evaluates(call, tile) != Evaluates.INTERVAL:
        share = evaluates(call, tile) / columns
        sides = (columns, rows) if by_key else (rows, columns)
        return StepGrid(heads, *sides, share)
    visited, whole = _tiles(call, tile)
    if by_key:
        visited, whole = visited.T, whole.T
    steps = _steps_of_a_row(visited, kernel, kind)
    every = visited.shape[0] * steps
    masked, idle = (visited & ~whole).sum() / every, 1.0 - visited.sum() / every
    return StepGrid(heads, visited.shape[0], steps, float(masked), float(idle))


def tile_shares(call: Call, tile: Tile) -> tuple[float, float]:
    """Return which shares of a call's tiles are computed without and with the mask."""
    visited, whole = _tiles(call, tile)
    return float(whole.mean()), float((visited & ~whole).mean())


def _tiles(call: Call, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
    """Return which tiles are visited, and which of them without the mask."""
    kinds = call.mask.block_map(tile[0], tile[1], call.q_len, call.kv_len)
    whole = kinds == FULL
    if call.kv_len % tile[1]:
        whole[:, -1] = False  # the last keys are padding
    return kinds != EMPTY, whole


def _steps_of_a_row(visited: np.ndarray, kernel: KernelKind, kind: Kind) -> float:
    """Return the steps of a row of tiles.

    tokamax lists the visited tiles alone. Other grids end with the longest row; the fused backward
    of JAX's kernel writes a part of dQ at every step, and keeps all of them.
    """
    if kernel == "tokamax_flash":
        return max(1.0, float(visited.sum())) / visited.shape[0]
    if kernel == "flash" and kind == "fused":
        return float(visited.shape[1])
    return float(max(1, visited.sum(axis=1).max()))


def is_one_interval(call: Call) -> bool:
    """Tell whether each query sees one interval of keys, whose ends fit one word."""
    spans = call.mask.spans(np.zeros(1, np.int32), np, True)
    if len(spans) != 1:
        return False
    width = min(call.kv_len, call.mask.most_keys() or call.kv_len)
    is_open = any(end is None for end in spans[0])
    return is_open or call.kv_len.bit_length() + width.bit_length() <= WORD
