"""Block-sparse lists of each batch row, made on the device from lengths, flags and segment ids.

Arithmetic on the least and the largest id of a tile, so lists are right for any ids, and short for
sorted ones. Rows with most tiles go first: a GPU is then busy until the end, however long segments
are. Rows of about as many are one class, and stay in their order: neighbours read the same tiles.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int8, Int32

from maxattn.kernels.base import Offset
from maxattn.kernels.fa4.block_sparse_lists import TileLists, Tiling, lists_of, tested_past
from maxattn.kernels.mask_split import kinds_by_arrays
from maxattn.masks import Mask

LIGHTEST = 26  # the class of rows without a tile; others have less than 2**26


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


def heaviest_first(lists: TileLists) -> Int32[Array, "3 R"]:
    """Order the rows of all batch rows in classes, those with most tiles first.

    Returns:
        batch row * rows + row; where the class of each begins among them; how many rows it has.
    """
    work = lists.work.reshape(-1)
    xp: Any = np if isinstance(work, np.ndarray) else jnp
    # A class is of 2**n to 2**(n + 1) - 1 tiles. The number of a row stands behind that of its
    # class, so that one array is sorted: a single launch.
    light = LIGHTEST - xp.frexp(work.astype(np.float32))[1].astype(np.int32)
    bits = max(1, (work.size - 1).bit_length())
    found = xp.sort((light << bits) | xp.arange(work.size, dtype=np.int32))
    start, size = _bounds(light, found >> bits, xp)
    return xp.stack([found & ((1 << bits) - 1), start, size]).astype(np.int32)


def _bounds(classes: Any, ascending: Any, xp: Any) -> tuple[Any, Any]:
    """Return where the class of each entry of `ascending` begins there, and how many it has."""
    many = (classes[:, None] == xp.arange(LIGHTEST + 1)[None]).sum(axis=0, dtype=np.int32)
    start = size = xp.zeros_like(ascending)
    for n in range(LIGHTEST + 1):
        start = start + xp.where(ascending > n, many[n : n + 1], 0)
        size = xp.where(ascending == n, many[n : n + 1], size)
    return start, size
