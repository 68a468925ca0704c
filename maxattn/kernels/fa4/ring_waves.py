"""How a backward over the blocks of a ring divides keys so that the last wave of a launch is full.

A launch has one thread block for each tile of keys, head and batch row, and a GPU runs them in
waves of one thread block per SM. The last wave takes as long as any, however few thread blocks it
has: 64 tiles of 40 heads are 19.4 waves on 132 SMs and take as long as 20; two tiles more make 20.0
waves. So each block of another rank has room for some spare keys, which are filled with keys of the
local block: fewer of these are left for the launches of the local block alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from maxattn.kernels.kv_block import KeySplit

LEAST_GAIN = 0.01  # of all waves: each spare tile costs copies and 128 keys more a transfer
# Each of two launches has at least one so-many'th of a block, to last as long as the transfer that
# runs beside it.
LEAST_PART = 4


class RingWaves(NamedTuple):
    """Say what the waves of a ring's backward depend on.

    Args:
        tiles: tiles of keys in a rank's block.
        rows: thread blocks a tile of keys: heads of all batch rows.
        ring_size: ranks of the ring.
        sms: streaming multiprocessors (SMs), each of which runs one thread block at a time.
    """

    tiles: int
    rows: int
    ring_size: int
    sms: int

    def waves(self, tiles: int) -> int:
        """Count the waves of one launch over so many tiles of keys."""
        return -(-tiles * self.rows // self.sms)

    def local_tiles(self, spare: int) -> int:
        """Count the tiles of the local block that no other block has room for."""
        return self.tiles - (self.ring_size - 1) * spare

    def all_waves(self, middle: int, spare: int) -> int:
        """Count the waves of all launches.

        Args:
            middle: tiles before the cut.
            spare: tiles that each block of another rank has room for.
        """
        block, rest = self.tiles + spare, self.local_tiles(spare) - middle
        in_two = max(self.ring_size - 3, 0)
        in_one = self.ring_size - 1 - in_two
        two = self.waves(middle) + self.waves(block - middle)
        local = self.waves(middle) + self.waves(rest)
        return in_one * self.waves(block) + in_two * two + local

    def ways(self) -> Iterator[tuple[int, int]]:
        """List each (middle, spare), in tiles, whose launches are all long enough."""
        least = max(self.tiles // LEAST_PART, 1)
        for spare in range(-(-self.sms // self.rows) + 1):
            most = self.local_tiles(spare) - least
            yield from ((middle, spare) for middle in range(least, most + 1))


def split_keys(length: int, tile: int, rows: int, ring_size: int, sms: int) -> KeySplit:
    """Choose the split with the fewest waves; of equals, few spare keys and two like halves.

    Args:
        length: keys of a rank's block.
        tile: keys of a tile.
        rows: thread blocks a tile of keys: heads of all batch rows.
        ring_size: ranks of the ring.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    made = RingWaves(-(-length // tile), rows, ring_size, sms)

    def cost(way: tuple[int, int]) -> tuple[int, int, int]:
        middle, spare = way
        return made.all_waves(middle, spare), spare, abs(2 * middle - made.tiles - spare)

    found = [(cost(way), way) for way in made.ways()]
    if not found:
        return KeySplit(0)
    plain, best = min(x for x in found if not x[1][1]), min(found)
    gains = plain[0][0] - best[0][0] >= LEAST_GAIN * plain[0][0]
    middle, spare = best[1] if gains else plain[1]
    return KeySplit(middle * tile, spare * tile)
