"""How a ring's backward divides keys so that its launches keep all processors of a GPU busy to
their ends.

A launch has a row of work for each tile of keys, head and batch row, and a processor takes one row
at a time: in rounds of as many rows as there are processors. The last round of a launch is as long
as any, however few rows it has. 64 tiles of 40 heads are 19.4 rounds of 132, which last 20; with
two more tiles they are 20.0. So a place has some tiles of its own keys computed along with each
block of another place: fewer are left for the launches of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from maxattn.kernels.kv_block import Shares

LEAST_GAIN = 0.01  # of all rounds: guests cost copies and 128 more keys a transfer, each
LEAST_PART = (
    4  # a part is no less than one so many'th of a block, to last as long as the transfer beside it
)


def divided(length: int, tile: int, rows: int, places: int, processors: int) -> Shares:
    """Choose the cut in two and the guests that leave fewest rounds; of equals, few guests and
    halves most alike.

    Args:
        length: of a place's keys.
        tile: keys of a row of work.
        rows: for each tile of keys: heads of all batch rows.
        places: of the ring.
        processors: that take a row each.
    """
    tiles = -(-length // tile)

    def rounds(n: int) -> int:
        return -(-n * rows // processors)

    def cost(middle: int, along: int) -> tuple[int, int, int]:
        block, rest = tiles + along, tiles - (places - 1) * along - middle
        one, two = _launches(places)
        in_two = rounds(middle) + rounds(block - middle)
        return (
            one * rounds(block) + two * in_two + rounds(middle) + rounds(rest),
            along,
            abs(2 * middle - block),
        )

    found = [(cost(*each), each) for each in _ways(tiles, places, -(-processors // rows))]
    if not found:
        return Shares(0)
    plain, best = (min(x for x in found if not x[1][1]), min(found))
    gains = plain[0][0] - best[0][0] >= LEAST_GAIN * plain[0][0]
    middle, along = best[1] if gains else plain[1]
    return Shares(middle * tile, along * tile)


def _launches(places: int) -> tuple[int, int]:
    """Count the other places' blocks that are computed in one launch, and those in two."""
    two = max(places - 3, 0)
    return places - 1 - two, two


def _ways(tiles: int, places: int, most: int) -> Iterator[tuple[int, int]]:
    """List (tiles before the cut, guests) whose parts are all long enough."""
    least = max(tiles // LEAST_PART, 1)
    for along in range(most + 1):
        own = tiles - (places - 1) * along
        yield from ((middle, along) for middle in range(least, own - least + 1))
