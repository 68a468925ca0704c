"""How a problem is launched, decided once for the kernel, the plan and `auto`.

`forward_launch` and `backward_launch` return a `Launch`, a value. `Fa4` runs the launch, `explain`
prints the launch's `line`, and `auto` reads its `microseconds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from math import ceil
from typing import NamedTuple

import numpy as np

from maxattn.kernels.fa4 import lists
from maxattn.kernels.fa4.problem import Problem
from maxattn.kernels.fa4.tiles import (
    Tile,
    backward_tile,
    backward_time,
    can_queue,
    forward_tiles,
    forward_time,
    library_tile,
)
from maxattn.kernels.fa4.work import ALL, Cut, best_cut, end_of, group_of

# A merge of splits: microseconds of its launches, and bytes a microsecond of the splits' results.
MERGE_US, MERGE_BYTES = 5.0, 2.5e6
READ_BYTES = 4e6  # bytes a microsecond that all SMs read from a Hopper GPU's memory
LAUNCH_US = 3.0  # microseconds of each launch before or after a pass's kernel
# Bytes of L2 for what a group of lanes reads; if all lanes fit WHOLE_CACHE, they are one group.
CACHE, WHOLE_CACHE = 24 << 20, 48 << 20
MOST_FORWARD, MOST_BACKWARD = 32, 128  # most splits of a tile row
MOST_SLOTS = 2**28  # most bytes of the splits' results
FEW_WAVES = 4  # most waves of items with which a launch with lists is cut
# The first key tile may store its dQ, to which other key tiles add, so that no launch clears dQ.
# Other key tiles wait for a flag per query tile, which takes less time than clearing if key tiles
# are few, dQ is large, and a head has many queries per key tile. (256 keys: 0.8 of the time, H200.)
FIRST_TILES, FIRST_SUMS, FIRST_OF_TILE = 32, 2**21, 3_000


class Launch(NamedTuple):
    """The launch of one pass, as a value."""

    tile: Tile  # numbers of queries and keys in a tile
    cut: Cut = Cut()  # which tile rows are cut into splits
    # whether thread blocks are persistent and take items from a queue; else each item has a thread
    # block of its own
    queue: bool = False
    # number of lanes (work.py) whose items start together, if an array lists the items
    group: int = 1
    # whether the first key tile stores dQ and the others add to it; else a launch before the kernel
    # clears dQ
    writes_first: bool = False
    microseconds: float = 0.0  # estimated time
    line: str = ""  # what `explain` prints


# ---- forward -------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def forward_launch(problem: Problem) -> Launch:
    """Return the launch of a forward: the tile, queue and cut with the smallest makespan."""
    if 0 in problem[:6]:
        return Launch(library_tile(problem.head_dim), line="no tiles")
    best, *others = sorted(_forward_launches(problem), key=lambda launch: launch.microseconds)
    group = _group(problem, best.tile, "queries") if problem.has_lists else 1
    line = _line(problem, best, "queries", "keys")
    if second := next((x for x in others if x.tile != best.tile), None):
        times = [f"{launch.microseconds / 1e3:.3g} ms" for launch in (best, second)]
        line += f"; estimated {times[0]}, and {times[1]} in {_tiles(second.tile)}"
    return best._replace(group=group, line=line)


def _forward_launches(p: Problem) -> Iterator[Launch]:
    if p.bias is not None:  # adding a bias takes registers, and no other tile was tried
        tile = library_tile(p.head_dim)
        yield Launch(tile, microseconds=_forward_end(p, tile)[0])
        return
    for tile in forward_tiles(p.head_dim, p.q_len, p.kv_len, p.has_lists):
        steps = p.steps(tile, "queries")
        queue = can_queue(p.head_dim, tile, p.has_lists) and len(steps) * p.lanes > p.sms
        if queue:
            time = forward_time(p.head_dim, tile, queue=True)
            end = end_of(time.start + steps * time.step, p.lanes, p.sms)
            yield Launch(tile, queue=True, microseconds=end)
        if queue and p.kind == "ids":  # items have unknown lengths, and many are short
            continue
        end, cut = _forward_end(p, tile)
        yield Launch(tile, cut, microseconds=end)


def _forward_end(p: Problem, tile: Tile) -> tuple[float, Cut]:
    """Return the smallest makespan and its cut, if each item has its own thread block."""
    steps, time = p.steps(tile, "queries"), forward_time(p.head_dim, tile, queue=False)
    width, blocks = ceil(p.head_dim / 16) * 16, len(steps) * p.lanes
    read = 4 * tile.keys * width * p.kv_heads / p.heads  # bytes of K and V that a step reads
    slot = 4 * tile.queries * width * p.lanes

    def time_of(steps: np.ndarray, running: int) -> np.ndarray:
        # With few tile rows most keys come from memory, not L2, and memory may not keep up.
        step = max(time.step, min(running, p.sms) * read / max(1, len(steps)) / READ_BYTES)
        return time.start + steps * step

    def merge(rows: int, splits: int) -> float:
        slots = rows * splits * slot
        return MERGE_US + slots / MERGE_BYTES if slots <= MOST_SLOTS else float("inf")

    is_long = p.has_lists and blocks > FEW_WAVES * p.sms
    most = 1 if is_long or p.kind in ("ids", "traced") or p.bias else MOST_FORWARD
    return best_cut(steps, p.lanes, p.sms, time_of, merge, most, tails=not p.has_lists)


def _group(p: Problem, tile: Tile, by: str) -> int:
    """Return how many lanes start together, so that what their items read fits L2."""
    longest = int(p.steps(tile, by).max(initial=1))
    if by == "queries":
        bytes_each = 4.0 * longest * tile.keys * p.head_dim * p.kv_heads / p.heads
    else:  # 2 bytes each of q and dout, and 4 bytes of dQ
        bytes_each = 8.0 * longest * tile.queries * p.head_dim
    lanes = p.heads if p.own_rows else p.lanes
    return group_of(lanes, bytes_each, CACHE if p.lanes * bytes_each > WHOLE_CACHE else WHOLE_CACHE)


# ---- backward ------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def backward_launch(problem: Problem) -> Launch:
    """Return the launch of a backward: a tile by head dim, and the cut of smallest makespan."""
    p = problem
    tile = backward_tile(p.head_dim, p.q_len, p.has_lists)
    if 0 in p[:6]:
        return Launch(tile, line="no tiles")
    end, cut = _backward_end(p, tile)
    # Bytes moved by the launch before the kernel (out, dout, zeros) and by that after (sums, dq).
    moved = p.lanes * p.q_len * p.head_dim * (8 + 6)
    launch = Launch(
        tile,
        cut,
        group=_group(p, tile, "keys") if p.has_lists else 1,
        writes_first=_writes_first(p, tile),
        microseconds=end + 2 * LAUNCH_US + moved / READ_BYTES,
    )
    return launch._replace(line=_line(p, launch, "keys", "queries"))


def _backward_end(p: Problem, tile: Tile) -> tuple[float, Cut]:
    steps, time = p.steps(tile, "keys"), backward_time(p.head_dim, tile)
    if p.kind == "lengths":  # the number of real keys is unknown; half is assumed
        steps = steps[: -(-len(steps) // 2)]
    blocks = len(steps) * p.lanes
    most = MOST_BACKWARD if blocks <= FEW_WAVES * p.sms or p.kind == "dense" else 1
    tails = p.kind == "dense" and p.heads == p.kv_heads and p.bias is None
    most = 1 if p.bias is not None else most

    def time_of(steps: np.ndarray, _: int) -> np.ndarray:
        return time.start + steps * time.step

    return best_cut(steps, p.lanes, p.sms, time_of, partial(_sums, p, tile), most, tails)


def _sums(p: Problem, tile: Tile, rows: int, splits: int) -> float:
    """Return the microseconds that the sum of dK and dV over the splits takes."""
    if p.heads != p.kv_heads:  # all splits add to the same float32 sums
        return LAUNCH_US
    slots = 4 * splits * rows * tile.keys * p.batch * p.kv_heads * p.head_dim
    return MERGE_US + slots / MERGE_BYTES if slots <= MOST_SLOTS else float("inf")


def _writes_first(p: Problem, tile: Tile) -> bool:
    if p.has_lists or p.bias is not None:
        return False
    tiles, sums = -(-p.kv_len // tile.keys), p.lanes * p.q_len * p.head_dim
    long_enough = p.q_len * p.head_dim >= FIRST_OF_TILE * tiles
    return tiles <= FIRST_TILES and sums >= FIRST_SUMS and long_enough


# ---- what `explain` prints -----------------------------------------------------------------------


def _tiles(tile: Tile) -> str:
    return f"{tile.queries}x{tile.keys} tiles"


def _line(p: Problem, launch: Launch, by: str, over: str) -> str:
    parts = [_tiles(launch.tile) + _mask_line(p, launch.tile)]
    if launch.queue:
        parts.append("dynamic persistent scheduler")
    if launch.writes_first:
        parts.append("the first key tile writes dQ")
    tail, splits = launch.cut
    if splits > 1:
        of = "query tile" if by == "queries" else "key tile"
        which = f"all {of}s" if tail == ALL else f"last {of}" if tail == 1 else f"last {tail} {of}s"
        parts.append(f"{which} split {splits} ways over {over}")
    return "; ".join(parts)


def _mask_line(p: Problem, tile: Tile) -> str:
    if p.kind == "lengths":
        return " up to the length of each batch row"
    if p.kind == "known" and p.offsets == (0, 0):
        empty, full, mixed = lists.tally(p.mask, tile, (p.q_len, p.kv_len))
        counts = f"{full} full, {mixed} mixed, {empty} of {full + mixed + empty} skipped"
        return f" of block-sparse lists: {counts}"
    if p.kind == "ids":
        each = "each batch row" if p.own_rows else "all batch rows"
        return f" of block-sparse lists, made on the device for {each}"
    return " of block-sparse lists, made on the device" if p.kind == "traced" else ""
