"""Bounds of what tiles of pairs hold, from masks whose arrays are known on the device alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

    from maxattn.masks.base import Mask


class TileBounds(NamedTuple):
    """What is sure of tiles: [batch or 1, tiles of queries or 1, tiles of keys or 1].

    Args:
        some: False where no pair is allowed.
        every: True where all pairs are.
    """

    some: Bool[Array, "B QB KB"]
    every: Bool[Array, "B QB KB"]

    def __and__(self, other: TileBounds) -> TileBounds:
        """Bound the pairs that both masks allow."""
        return TileBounds(self.some & other.some, self.every & other.every)

    def __or__(self, other: TileBounds) -> TileBounds:
        """Bound what either mask allows."""
        return TileBounds(self.some | other.some, self.every | other.every)

    def __invert__(self) -> TileBounds:
        """Bound what the mask forbids."""
        return TileBounds(~self.every, ~self.some)


def unknown() -> TileBounds:
    """Return bounds that any mask is within."""
    one = jnp.ones((1, 1, 1), bool)
    return TileBounds(one, ~one)


@dataclass(frozen=True)
class Tiles:
    """The tiles that the pairs of a call are cut into.

    Args:
        blocks: queries and keys of a tile.
        lengths: local queries and keys; the last tiles may be ragged.
        kv_offset: position of the first local key; an int or traced.
        of_positions: bounds a mask without arrays.
    """

    blocks: tuple[int, int]
    lengths: tuple[int, int]
    kv_offset: Any
    of_positions: Callable[[Mask], TileBounds]

    def cut(self, x: Any, axis: int) -> Array:
        """Cut an array [B, tokens] of queries (0) or keys (1) into tiles: [B, tiles, tokens].

        The last entry is repeated, as `Mask.allowed` reads it.
        """
        block, length = self.blocks[axis], self.lengths[axis]
        if x.shape[-1] == length and length % block == 0:
            return jnp.asarray(x).reshape(*x.shape[:-1], -1, block)
        at = np.arange(-(-length // block) * block).reshape(-1, block)
        return jnp.take(jnp.asarray(x), np.minimum(at, length - 1), axis=-1, mode="clip")

    def key_ends(self) -> tuple[Array, Array]:
        """Return the positions of each tile's first key and of the one after its last: [tiles]."""
        start = np.arange(0, self.lengths[1], self.blocks[1], dtype=np.int32)
        end = np.minimum(start + self.blocks[1], self.lengths[1]).astype(np.int32)
        return jnp.asarray(start) + self.kv_offset, jnp.asarray(end) + self.kv_offset


def of_ids(q: Array, kv: Array) -> TileBounds:
    """Bound tiles by the ids of their queries and keys: [B, tiles, tokens].

    Ranges of ids that do not meet have no id in common; whether those that do meet have one depends
    on the order of the ids.
    """
    q_low, q_high, q_one = (x[:, :, None] for x in _range(q))
    kv_low, kv_high, kv_one = (x[:, None, :] for x in _range(kv))
    meet = (q_low <= kv_high) & (kv_low <= q_high)
    return TileBounds(meet, meet & q_one & kv_one)


def _range(ids: Array) -> tuple[Array, Array, Array]:
    """Return the least and largest id of each tile, and whether it has one id and no padding."""
    ids = ids.astype(jnp.int32)
    low = jnp.min(jnp.where(ids < 0, np.iinfo(np.int32).max, ids), axis=-1)
    high = jnp.maximum(jnp.max(ids, axis=-1), -1)
    return low, high, jnp.min(ids, axis=-1) == high
