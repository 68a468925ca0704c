"""Block-sparse lists of each batch row, made on the device from lengths, flags and segment ids.

Arithmetic on the least and the largest id of a tile, so lists are right for any ids, and short for
sorted ones. Rows with most tiles go first: a GPU is then busy until the end, however long segments
are. Rows of about as many are one class, and stay in their order: neighbours read the same tiles.
Short rows of a forward read few, and start with all heads after each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int8, Int32

from maxattn.kernels.base import Offset
from maxattn.kernels.fa4.block_sparse_lists import TileLists, Tiling, lists_of, tested_past
from maxattn.kernels.fa4.tile_sizes import SHORT_ROW
from maxattn.masks import Mask
from maxattn.masks.tile_kinds import kinds_by_arrays


def row_tiling(
    mask: Mask,
    tiles: tuple[tuple[int, int], tuple[int, int]],
    lengths: tuple[int, int],
    offsets: tuple[Offset, Offset] = (0, 0),
) -> Tiling:
    """List the tiles of both passes: lists as of `tiling`, for each batch row.

    Batch rows that are known to be alike share theirs, which have no batch axis then.

    Args:
        mask: bound, with arrays.
        tiles: (queries, keys) of a tile, of the forward and of the backward.
        lengths: local numbers of queries and keys.
        offsets: positions of the first query and key.
    """
    forward, backward = (kinds_by_arrays(mask, tile, lengths, offsets) for tile in tiles)
    by_keys = tested_past(backward.swapaxes(1, 2), lengths[1] // tiles[1][1])
    return Tiling(lists_of(_shared(forward)), lists_of(_shared(by_keys)))


def _shared(kinds: Int8[Array, "B rows columns"]) -> Int8[Array, "*B rows columns"]:
    return kinds[0] if kinds.shape[0] == 1 else kinds


class RowClasses(NamedTuple):
    """Say which rows start together, those of the class with most tiles first.

    Attributes:
        parts: of each power of 2: rows of 2**n to 2**(n + 1) - 1 tiles are so many classes.
        short: a power of 2: each row of fewer tiles is a class of its own; 0 for none.
    """

    parts: int = 1
    short: int = 0

    def of(self, work: Any, most: int, xp: Any) -> Any:
        """Return the class of rows of so many tiles, at most `most`; 0 is the heaviest."""
        fraction, exponent = xp.frexp(work.astype(np.float32))
        part = xp.maximum((2 * fraction - 1) * self.parts, 0).astype(np.int32)
        return self.many(most) - 1 - (exponent.astype(np.int32) * self.parts + part)

    def many(self, most: int) -> int:
        """Return how many classes there are."""
        return (most.bit_length() + 1) * self.parts

    def alone(self, classes: Any, most: int) -> Any:
        """Tell which classes are of short rows."""
        return classes >= self.many(most) - self.short.bit_length() * self.parts


# A forward's thread blocks that take a row in each wave wait for the longest: rows of a class are
# to be even. Rows of a backward start as SMs get free; large classes keep neighbours together.
FORWARD_CLASSES, BACKWARD_CLASSES = RowClasses(8, SHORT_ROW), RowClasses()


def heaviest_first(lists: TileLists, classes: RowClasses = BACKWARD_CLASSES) -> Int32[Array, "3 R"]:
    """Order the rows of all batch rows in classes, those with most tiles first.

    Args:
        lists: of all rows.
        classes: which rows start together.

    Returns:
        batch row * rows + row; where the class of each begins among them; how many rows it has.
    """
    most = lists.mixed.shape[-1] + lists.full.shape[-1]
    return in_classes(lists.work.reshape(-1), most, classes)


def in_classes(work: Any, most: int, classes: RowClasses) -> Int32[Array, "3 R"]:
    """Order rows of so many tiles, `most` at most, as `heaviest_first`; in numpy where known."""
    xp: Any = np if isinstance(work, np.ndarray) else jnp
    light = classes.of(work, most, xp)
    # The number of a row stands behind that of its class, so that one array is sorted: a single
    # launch.
    bits = max(1, (work.size - 1).bit_length())
    found = xp.sort((light << bits) | xp.arange(work.size, dtype=np.int32))
    start, size = _bounds(light, found >> bits, classes.many(most), xp)
    alone = classes.alone(found >> bits, most)
    start, size = xp.where(alone, xp.arange(work.size), start), xp.where(alone, 1, size)
    return xp.stack([found & ((1 << bits) - 1), start, size]).astype(np.int32)


def _bounds(classes: Any, ascending: Any, count: int, xp: Any) -> tuple[Any, Any]:
    """Return where the class of each entry of `ascending` begins there, and how many it has."""
    many = (classes[:, None] == xp.arange(count)[None]).sum(axis=0, dtype=np.int32)
    start = size = xp.zeros_like(ascending)
    for n in range(count):
        start = start + xp.where(ascending > n, many[n : n + 1], 0)
        size = xp.where(ascending == n, many[n : n + 1], size)
    return start, size
