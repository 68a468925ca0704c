"""Block-sparse lists of each batch row, made on the device from lengths, flags and segment ids.

Arithmetic on the least and the largest id of a tile, so lists are right for any ids, and short for
sorted ones.
"""

from __future__ import annotations

from functools import partial

import jax
from jaxtyping import Array, Int8

from maxattn.kernels.base import Offset
from maxattn.kernels.fa4.block_sparse_lists import TileLists, Tiling, lists_of, tested_past
from maxattn.kernels.mask_split import kinds_by_arrays
from maxattn.masks import Mask


def row_tiling(
    mask: Mask,
    tiles: tuple[tuple[int, int], tuple[int, int]],
    lengths: tuple[int, int],
    offsets: tuple[Offset, Offset] = (0, 0),
) -> Tiling:
    """List the tiles of both passes: lists as of `tiling`, with a first axis of batch rows.

    Args:
        mask: bound, with arrays.
        tiles: (queries, keys) of a tile, of the forward and of the backward.
        lengths: local numbers of queries and keys.
        offsets: positions of the first query and key.
    """
    forward, backward = (kinds_by_arrays(mask, tile, lengths, offsets) for tile in tiles)
    by_keys = partial(_by_keys, whole=lengths[1] // tiles[1][1])
    return Tiling(jax.vmap(lists_of)(forward), jax.vmap(by_keys)(backward))


def _by_keys(kinds: Int8[Array, "QB KB"], whole: int) -> TileLists:
    return lists_of(tested_past(kinds.T, whole))
