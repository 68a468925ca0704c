"""Mean and sum of squares about it, over the threads of a block, without loss where the mean is
large: parts are merged with their own means (Chan, Golub and LeVeque, 1979).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from maxattn.modules.adaptive_layer_norm.threads import OCTET, WARP
from maxattn.modules.norm_rope.cute_steps import total

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")


class Moments(NamedTuple):
    """Hold the moments of some numbers.

    Args:
        count: how many they are: a number where the compiler knows it.
        mean: of them.
        squares: sum of squares of their distances from the mean.
    """

    count: Any
    mean: Any
    squares: Any

    @staticmethod
    def of(place: Any, row: list[list[Any]]) -> Moments:
        """Return the moments of a thread's channels, those that it repeats left out."""
        *before, last = [total(each) for each in row]
        count, own = _count(place)
        mean = total([*before, _where(own, last)]) * _inverse(count)
        squares = [[(x - mean) * (x - mean) for x in each] for each in row]
        *before, last = [total(each) for each in squares]
        return Moments(count, mean, total([*before, _where(own, last)]))

    def with_lane(self, distance: int) -> Moments:
        """Merge with what a thread at a distance has; both get the same."""
        count, mean, squares = (_from_lane(x, distance) for x in self)
        apart = mean - self.mean
        if isinstance(self.count, float):
            merged = self.squares + squares + apart * apart * (0.5 * self.count)
            return Moments(2 * self.count, (self.mean + mean) * 0.5, merged)
        both = self.count + count
        inverse = _inverse(both)
        shared = (self.count * self.mean + count * mean) * inverse
        merged = self.squares + squares + apart * apart * (self.count * count * inverse)
        return Moments(both, shared, merged)

    def with_next(self, other: Moments) -> Moments:
        """Merge with moments of so many numbers, both counts known to the compiler."""
        both, apart = self.count + other.count, other.mean - self.mean
        mean = self.mean + apart * (other.count / both)
        weight = self.count * other.count / both
        return Moments(both, mean, self.squares + other.squares + apart * apart * weight)


def over_block(place: Any, mine: Moments, shared: Any, i: Any) -> Moments:
    """Merge over the block, once a row: rows take turns with two sets, between barriers.

    Args:
        place: of the thread.
        mine: of its channels.
        shared: [2, 2, warps]; None for a block of one warp.
        i: number of the row in its block.
    """
    for step in range(WARP.bit_length() - 1):
        mine = mine.with_lane(1 << step)
    if not place.threads.are_full:
        # Counts that differ are rounded in another order in each thread: take one's.
        mine = Moments(*(cute.arch.shuffle_sync(x, 0) for x in mine))
    if shared is None:
        return mine
    turn, warp = i % 2, cute.arch.warp_idx()
    shared[turn, 0, warp], shared[turn, 1, warp] = mine.mean, mine.squares
    cute.arch.sync_threads()
    counts = enumerate(map(place.threads.of_warp, range(place.threads.warps)))
    parts = [Moments(float(n), shared[turn, 0, w], shared[turn, 1, w]) for w, n in counts if n]
    found = parts[0]
    for part in parts[1:]:
        found = found.with_next(part)
    return found


def _count(place: Any) -> tuple[Any, Any]:
    """Return how many channels a thread has, and whether those of the last pass are its own."""
    threads = place.threads
    if threads.are_full:
        return float(OCTET * threads.passes), None
    before = OCTET * (threads.passes - 1)
    own = place.index + (threads.passes - 1) * threads.threads < threads.octets
    more, none = cutlass.Float32(before + OCTET), cutlass.Float32(before)
    return cutlass.select_(own, more, none), own


def _where(own: Any, x: Any) -> Any:
    return x if own is None else cutlass.select_(own, x, cutlass.Float32(0.0))


def _inverse(count: Any) -> Any:
    """Return 1 / count, and 1 for none."""
    if isinstance(count, float):
        return 1.0 / count
    return 1.0 / cutlass.select_(count > 0.0, count, cutlass.Float32(1.0))


def _from_lane(x: Any, distance: int) -> Any:
    return x if isinstance(x, float) else cute.arch.shuffle_sync_bfly(x, offset=distance)
