"""How a problem is launched: the one decision, for the kernel, the plan and `auto`.

`forward_launch` and `backward_launch` return a `Launch`, a value. `Fa4` runs it, `explain` prints
its `line`, and `auto` reads its `microseconds`.
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
from maxattn.kernels.fa4.work import ALL, Cut, Uniform, cut, end_of, group_of

# A merge of splits: two launches, and what splits write, in bytes a microsecond.
MERGE_US, MERGE_BYTES = 5.0, 2.5e6
READ_BYTES = 4e6  # that all SMs read in a microsecond, from a Hopper GPU's memory
LAUNCH_US = 3.0  # a launch that a pass needs beside its own
# Bytes of keys and values that L2 holds: for a group of lanes; for all, if no groups are needed.
CACHE, WHOLE_CACHE = 24 << 20, 48 << 20
MOST_FORWARD, MOST_BACKWARD = 32, 128  # splits
MOST_SLOTS = 2**28  # bytes of the results of splits
FEW_WAVES = 4  # of items with lists, beyond which none is cut
# The first key tile stores its dQ and the others add to it, so that no launch clears the float32
# sums. The others wait for a flag of each query tile: a head needs many queries for each key tile,
# and dQ must be large enough to pay for the flags. (256 keys: 0.8 of the time, H200.)
FIRST_TILES, FIRST_SUMS, FIRST_OF_TILE = 32, 2**21, 3_000


class Launch(NamedTuple):
    """The launch of one pass, as a value.

    Attributes:
        tile: queries and keys at a time.
        items: the items, if a formula gives them; None for an array of items.
        queue: whether thread blocks are persistent and take items from a queue; else each item has
            a thread block of its own.
        splits: number of splits of each tile row, if there are lists.
        group: number of lanes whose items start together, in an array of items.
        writes_first: whether the first tile of keys writes dQ, to which the others add; else a
            launch before clears it.
        microseconds: estimated time.
        line: what `explain` prints.
    """

    tile: Tile
    items: Uniform | None = None
    queue: bool = False
    splits: int = 1
    group: int = 1
    writes_first: bool = False
    microseconds: float = 0.0
    line: str = ""

    @property
    def cut(self) -> Uniform:
        """Which items are cut: `items`, or all of an array of items into `splits`."""
        return self.items or (Uniform(ALL, self.splits) if self.splits > 1 else Uniform())


# ---- forward -------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def forward_launch(problem: Problem) -> Launch:
    """Decide how a forward is launched: the tile, queue and cut whose last item ends first."""
    if 0 in problem[:6]:
        return Launch(library_tile(problem.head_dim), Uniform(), line=_tiles_line(problem, 0))
    best = min(_forward_launches(problem), key=lambda launch: launch.microseconds)
    group = _group(problem, best.tile, "queries") if problem.has_lists else 1
    return best._replace(group=group, line=_line(problem, best, "queries", "keys"))


def _forward_launches(p: Problem) -> Iterator[Launch]:
    if p.bias is not None:  # its sum takes registers: no other tile was tried
        tile = library_tile(p.head_dim)
        yield Launch(tile, Uniform(), microseconds=_forward_end(p, tile).end)
        return
    for tile in forward_tiles(p.head_dim, p.q_len, p.kv_len, p.has_lists):
        steps = p.steps(tile, "queries")
        queue = can_queue(p.head_dim, tile, p.has_lists) and len(steps) * p.lanes > p.sms
        if queue:
            time = forward_time(p.head_dim, tile, queue=True)
            end = end_of(time.start + steps * time.step, p.lanes, p.sms)
            items = None if p.has_lists else Uniform()
            yield Launch(tile, items, queue=True, microseconds=end)
        if queue and p.kind == "ids":  # items of unknown lengths, many of them short
            continue
        found = _forward_end(p, tile)
        uniform = Uniform(found.tail, found.splits)
        items, splits = (None, found.splits) if p.has_lists else (uniform, 1)
        yield Launch(tile, items, splits=splits, microseconds=found.end)


def _forward_end(p: Problem, tile: Tile) -> Cut:
    """Return when a forward ends with a thread block for each item, cut if that ends sooner."""
    steps, time = p.steps(tile, "queries"), forward_time(p.head_dim, tile, queue=False)
    width, blocks = ceil(p.head_dim / 16) * 16, len(steps) * p.lanes
    read = 4 * tile.keys * width * p.kv_heads / p.heads  # bytes of keys and values of a step
    slot = 4 * tile.queries * width * p.lanes

    def time_of(steps: np.ndarray, running: int) -> np.ndarray:
        # Few tile rows read their keys from memory, which may not keep up.
        step = max(time.step, min(running, p.sms) * read / max(1, len(steps)) / READ_BYTES)
        return time.start + steps * step

    def merge(rows: int, splits: int) -> float:
        slots = rows * splits * slot
        return MERGE_US + slots / MERGE_BYTES if slots <= MOST_SLOTS else float("inf")

    is_long = p.has_lists and blocks > FEW_WAVES * p.sms
    most = 1 if is_long or p.kind in ("ids", "traced") or p.bias else MOST_FORWARD
    return cut(steps, p.lanes, p.sms, time_of, merge, most, tails=not p.has_lists)


def _group(p: Problem, tile: Tile, by: str) -> int:
    """Return how many lanes start together, so that L2 holds what their items read."""
    longest = int(p.steps(tile, by).max(initial=1))
    if by == "queries":
        bytes_each = 4.0 * longest * tile.keys * p.head_dim * p.kv_heads / p.heads
    else:  # q and dout, and the float32 sums of dQ
        bytes_each = 8.0 * longest * tile.queries * p.head_dim
    lanes = p.heads if p.own_rows else p.lanes
    return group_of(lanes, bytes_each, CACHE if p.lanes * bytes_each > WHOLE_CACHE else WHOLE_CACHE)


# ---- backward ------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def backward_launch(problem: Problem) -> Launch:
    """Decide how a backward is launched: its tile from a table, the cut of least makespan."""
    p = problem
    tile = backward_tile(p.head_dim, p.q_len, p.has_lists)
    if 0 in p[:6]:
        return Launch(tile, Uniform(), line=_tiles_line(p, 0))
    found, first = _backward_end(p, tile), _writes_first(p, tile)
    moved = p.lanes * p.q_len * p.head_dim * (8 + 6)  # before: out, dout, zeros; after: sums, dq
    launch = Launch(
        tile,
        None if p.has_lists else Uniform(found.tail, found.splits),
        splits=found.splits if p.has_lists else 1,
        group=_group(p, tile, "keys") if p.has_lists else 1,
        writes_first=first,
        microseconds=found.end + 2 * LAUNCH_US + moved / READ_BYTES,
    )
    return launch._replace(line=_line(p, launch, "keys", "queries"))


def _backward_end(p: Problem, tile: Tile) -> Cut:
    steps, time = p.steps(tile, "keys"), backward_time(p.head_dim, tile)
    if p.kind == "lengths":  # how many keys are real is not known: taken to be half
        steps = steps[: -(-len(steps) // 2)]
    blocks = len(steps) * p.lanes
    most = MOST_BACKWARD if blocks <= FEW_WAVES * p.sms or p.kind == "dense" else 1
    tails = p.kind == "dense" and p.heads == p.kv_heads and p.bias is None
    most = 1 if p.bias is not None else most

    def time_of(steps: np.ndarray, _: int) -> np.ndarray:
        return time.start + steps * time.step

    return cut(steps, p.lanes, p.sms, time_of, partial(_sums, p, tile), most, tails)


def _sums(p: Problem, tile: Tile, rows: int, splits: int) -> float:
    """Return the time that the sum of dK and dV over the splits takes."""
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


def _tiles_line(p: Problem, tile: Tile | int) -> str:
    return f"{tile.queries}x{tile.keys} tiles" if isinstance(tile, Tile) else "no tiles"


def _line(p: Problem, launch: Launch, by: str, over: str) -> str:
    parts = [_tiles_line(p, launch.tile) + _mask_line(p, launch.tile)]
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
        full, mixed, skipped = lists.tally(p.mask, tile, (p.q_len, p.kv_len))
        counts = f"{full} full, {mixed} mixed, {skipped} of {full + mixed + skipped} skipped"
        return f" of block-sparse lists: {counts}"
    if p.kind == "ids":
        each = "each batch row" if p.own_rows else "all batch rows"
        return f" of block-sparse lists, made on the device for {each}"
    return " of block-sparse lists, made on the device" if p.kind == "traced" else ""
