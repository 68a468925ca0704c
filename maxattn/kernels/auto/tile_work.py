"""How many tiles each kernel goes through on a GPU, and in how many thread blocks.

FlashAttention-4's sizes are those it is launched with, tokamax's those that its own rules give, and
cuDNN, which does not say, counts as 128 queries by 128 keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from maxattn.call import Call
from maxattn.kernels.fa4.block_sparse_lists import tally, visits_by_keys, visits_by_queries
from maxattn.kernels.fa4.forward_tiles import IDS_SHARE
from maxattn.kernels.fa4.tile_sizes import Tile
from maxattn.masks import Full, LocalWindow, Mask
from maxattn.masks.terms import SplitMask, split_mask

OTHERS = Tile(128, 128)  # of the libraries that do not say
TOKAMAX_SHORT = 128  # the longest head dim whose tiles of 128 keys fit tokamax's shared memory
CUT_BY_IDS = 2  # tiles of a row: where its segments begin and end
TOKAMAX_BACKWARD = Tile(128, 64), Tile(64, 128)  # of dQ; of dK and dV
EVEN = 1.1  # the longest row of tiles over the mean, up to which all are about as long
# Of the pairs: a plan knows that there are lengths or ids, and not which.
KNOWN_LENGTHS = 0.6


class TileWork(NamedTuple):
    """Count what a pass goes through.

    Attributes:
        blocks: thread blocks, of all heads.
        steps: tiles that all of them visit.
        longest: tiles that one of them visits, at most.
        tested: those of the steps whose pairs are tested.
        looks_up: whether a test reads arrays; else it compares positions.
    """

    blocks: float
    steps: float
    longest: float
    tested: float = 0.0
    looks_up: bool = False

    def lasts(self, sms: int) -> float:
        """Return how many tiles an SM goes through until the last thread block ends.

        Even rows run in whole waves. Of uneven ones each SM takes the next as soon as it is free,
        and waits at the end for half of the longest.

        Args:
            sms: streaming multiprocessors, each of which runs one thread block at a time.
        """
        in_waves = -(-self.blocks // sms) * self.steps / self.blocks
        is_even = self.longest * self.blocks <= EVEN * self.steps
        if is_even or self.blocks <= sms:
            return max(in_waves, self.longest)
        return max(self.longest, min(in_waves, self.steps / sms + self.longest / 2))


class Known(NamedTuple):
    """Say what the arrays of a mask leave: what a plan takes for granted, or what was measured.

    Attributes:
        lengths: the share of the keys that are real.
        ids: the mask of positions that allows what ids do; None where it is not known.
    """

    lengths: float = KNOWN_LENGTHS
    ids: Mask | None = None


UNKNOWN = Known()


class Seen(NamedTuple):
    """Say which tiles a kernel visits.

    Attributes:
        mask: of positions, whose empty tiles it skips.
        share: of the others, that lengths or ids leave.
        tests_all: whether it tests every tile; else those that the mask cuts.
        has_ids: whether tiles are cut by ids, which a test looks up.
    """

    mask: Mask
    share: float = 1.0
    tests_all: bool = False
    has_ids: bool = False

    def tests(self, full: int, mixed: int, rows: int) -> float:
        """Return how many tiles of a head are tested.

        Args:
            full, mixed: tiles of the positions that are not empty.
            rows: of tiles.
        """
        if self.tests_all:
            return full + mixed
        if self.has_ids and self.mask.is_full:  # ids that are not known
            return min(CUT_BY_IDS * rows, full)
        return mixed * (not self.mask.is_full)


def seen_by(kernel: str, call: Call, known: Known = UNKNOWN) -> Seen:
    """Return what a kernel's forward visits, and the backward of all but tokamax.

    Args:
        kernel: its name.
        call: of one device.
        known: what lengths and ids leave.
    """
    if has_lengths_alone(call):
        return Seen(positions_of(call.mask), known.lengths)
    if kernel != "flash" or not has_ids(call):
        return Seen(positions_of(call.mask))
    if known.ids is not None:
        return Seen(known.ids, has_ids=True)
    return Seen(positions_of(call.mask), IDS_SHARE, has_ids=True)


def seen_by_tokamax_backward(call: Call) -> Seen:
    """Return what tokamax's backward visits: all but the empty tiles of a triangle, tested."""
    positions = positions_of(call.mask)
    if is_causal(positions):
        return Seen(positions)
    return Seen(Full(), tests_all=not call.mask.is_full)


def seen_by_cudnn_backward(call: Call, seen: Seen) -> Seen:
    """Return what cuDNN's backward visits: of two sides of a window it skips one (seen)."""
    band = seen.mask.band()
    if band is None or band.left is None or not band.right:
        return seen
    open_left = LocalWindow(None, band.right, offset=band.offset)
    return seen._replace(mask=open_left.bind(call.q_len, call.kv_len))


def by_queries(call: Call, tile: Tile, seen: Seen) -> TileWork:
    """Count thread blocks that each take a tile of queries of one head."""
    return _work(call, tile, seen, call.batch * call.heads, backward=False)


def by_keys(call: Call, tile: Tile, seen: Seen, shared: bool = False) -> TileWork:
    """Count thread blocks that each take a tile of keys, of one query head.

    Args:
        call: of one device.
        tile: queries and keys at a time.
        seen: which tiles are visited.
        shared: whether one thread block takes all query heads of its key head.
    """
    lanes = call.batch * (call.kv_heads if shared else call.heads)
    return _work(call, tile, seen, lanes, backward=True)


def _work(call: Call, tile: Tile, seen: Seen, lanes: int, backward: bool) -> TileWork:
    lengths, heads = (call.q_len, call.kv_len), call.batch * call.heads
    full, mixed, _ = tally(seen.mask, tile, lengths)
    most = _longest(seen.mask, tile, lengths, backward) * heads / lanes
    rows = -(-lengths[backward] // tile[backward])
    steps = max(1.0, seen.share * heads * (full + mixed))
    tested = heads * seen.tests(full, mixed, rows)
    return TileWork(lanes * rows, steps, most, tested, seen.has_ids or seen.mask.looked_up > 0)


def _longest(mask: Mask, tile: Tile, lengths: tuple[int, int], backward: bool) -> int:
    """Return the most tiles that a row of tiles visits; of a backward, a column."""
    visits = visits_by_keys if backward else visits_by_queries
    return int(visits(mask, tile, lengths).max(initial=0))


def cudnn_backward_tile(call: Call) -> Tile:
    """Return the tile that cuDNN's backward times are told best by; it does not say its own."""
    return Tile(64, 64) if call.head_dim > 128 else Tile(64, 128)


def tokamax_forward_tile(head_dim: int) -> Tile:
    """Return the tile of tokamax's forward: 128 keys where that fits its shared memory."""
    return Tile(128, 128 if head_dim <= TOKAMAX_SHORT else 64)


# ---- masks ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def positions_of(mask: Mask) -> Mask:
    """Return what a mask says of positions alone; everything where it is no such mask."""
    split = split_mask(mask)
    return split.positions if isinstance(split, SplitMask) else Full()


def is_causal(positions: Mask) -> bool:
    """Tell whether positions are a triangle: a band that is open to the left."""
    band = positions.band()
    return band is not None and not band.is_full and band.left is None


def has_ids(call: Call) -> bool:
    """Tell whether a mask has arrays that are not of keys alone: what it allows is not known."""
    return call.mask.has_data and not has_lengths_alone(call)


def has_lengths_alone(call: Call) -> bool:
    """Tell whether a mask's arrays are of keys alone."""
    terms = call.mask.terms()
    return call.mask.has_data and all(term.is_of_keys or not term.has_data for term in terms)
