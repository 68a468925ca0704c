"""The row that the Triton kernels of norm and rotary embedding take: its chunks, loads, stores.

A row is one token's projection, N heads of H channels. It is taken as chunks of whole heads, and
every chunk as two halves (a, b) of channels that are pairs of the rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.devices import SMS
from maxattn.jax_private.triton import triton_split
from maxattn.modules.norm_rope.row import NormRopeRow

CHUNK = 1024  # channels
MAX_CHUNKS = 32
# Channels of a thread. More make fewer reductions across threads, fewer spare registers: about so
# many measured best on an H200, for rows of 1,536 and of 5,120; few heads in a chunk leave a thread
# more.
CHANNELS = 12
ROOMY = 24  # up to here registers hold bias, scale and the next row as well
MOST_CHANNELS = 48  # beyond, not even the sums
Parts = tuple[Array, ...]  # of a chunk as it is loaded: the whole, or a and b
Pair = Parts  # a and b


@dataclass(frozen=True)
class TritonRow(NormRopeRow):
    """Say how Triton's programs share a row; H is a power of two, at least 16."""

    @staticmethod
    def of(row: NormRopeRow) -> TritonRow:
        """Return how a row is shared."""
        return TritonRow(row.heads, row.head_dim, row.norm, row.eps, row.style)

    @property
    def chunk(self) -> int:
        """Return the heads of a chunk, a power of two that divides N."""
        return gcd(self.heads, max(1, CHUNK // self.head_dim))

    @property
    def chunks(self) -> int:
        """Return into how many chunks a row is taken."""
        return self.heads // self.chunk

    @property
    def warps(self) -> int:
        """Return how many warps of 32 threads work on a row."""
        need, most = self.heads * self.head_dim // CHANNELS, self.chunk * self.head_dim // 4
        return max(1, 2 ** ((min(need, most) - 1).bit_length()) // 32)

    @property
    def channels(self) -> float:
        """Return how many channels a thread has."""
        return self.heads * self.head_dim / (32 * self.warps)

    @property
    def programs(self) -> int:
        """Return how many programs the backward has: each keeps a set of sums.

        They are about as many as a GPU holds at once.
        """
        held = 16 if self.channels <= CHANNELS else 8  # warps of an SM
        return -(-SMS * held // self.warps)

    def fits(self) -> bool:
        """Say whether the kernels take such a row."""
        power = self.head_dim & (self.head_dim - 1) == 0
        if not power or not 16 <= self.head_dim <= 512 or self.chunks > MAX_CHUNKS:
            return False
        return self.channels <= MOST_CHANNELS


def angles_of(row: TritonRow, tables: Any, token: Any) -> Pair | None:
    """Load the cosines and sines of a token: [heads, H/2]."""
    if not tables:
        return None
    # In the shape of a chunk, heads repeated: each thread then loads what it needs, and none
    # exchanges any.
    channel = jax.lax.broadcasted_iota(jnp.int32, (row.chunk, row.head_dim // 2), 1)
    cos, sin = (ref[jax.lax.rem(token, jnp.int32(ref.shape[0])), channel] for ref in tables)
    return cos, sin


def pairs(row: TritonRow, parts: Parts) -> Pair:
    """Return the two halves of a chunk's pairs, twice [heads, H/2]."""
    if row.style != "interleaved":
        return parts[0], parts[1]
    return triton_split(parts[0].reshape(row.chunk, row.head_dim // 2, 2))


# ---- memory --------------------------------------------------------------------------------------


def read_row(row: TritonRow, ref: Any, token: Any) -> list[Parts]:
    """Load a row as it stands in memory, chunk by chunk."""
    return [
        tuple(ref[token, _heads(row, c), part] for part in _parts(row)) for c in range(row.chunks)
    ]


def vector_pairs(row: TritonRow, refs: dict[str, Any]) -> dict[str, list[Pair]]:
    """Load bias and scale, chunk by chunk, each as the two halves of its pairs."""
    return {
        name: [pairs(row, parts) for parts in each]
        for name, each in load_vectors(row, refs).items()
    }


def load_vectors(row: TritonRow, refs: dict[str, Any]) -> dict[str, list[Parts]]:
    """Load bias and scale, those that there are, chunk by chunk."""
    return {
        name: [_load_vector(row, ref, c) for c in range(row.chunks)] for name, ref in refs.items()
    }


def _load_vector(row: TritonRow, ref: Any, c: int) -> Parts:
    if ref.shape[0] == row.heads:
        return as_float32(tuple(ref[_heads(row, c), part] for part in _parts(row)))
    return as_float32(tuple(_repeated(row, ref, part) for part in _parts(row)))


def _repeated(row: TritonRow, ref: Any, part: Any) -> Float[Array, "heads H"]:
    """Load what all heads share, in the shape of a chunk."""
    channel = part.start + jax.lax.broadcasted_iota(jnp.int32, (row.chunk, part.size), 1)
    return ref[jnp.zeros_like(channel), channel]


def as_float32(raw: Parts) -> Parts:
    return tuple(each.astype(jnp.float32) for each in raw)


def store(row: TritonRow, ref: Any, index: Any, c: int, x: Pair) -> None:
    """Store a chunk of a token's row, or of a program's sums."""
    a, b = (each.astype(ref.dtype) for each in x)
    if row.style == "interleaved":
        ref[index, _heads(row, c), :] = jnp.stack((a, b), axis=-1).reshape(row.chunk, row.head_dim)
        return
    for each, part in zip((a, b), _parts(row), strict=True):
        ref[index, _heads(row, c), part] = each


def _heads(row: TritonRow, c: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(c * row.chunk, row.chunk)


def _parts(row: TritonRow) -> list[Any]:
    """Return the channels of a head that are loaded together: all, or each half of the pairs."""
    from jax.experimental import pallas as pl

    half = row.head_dim // 2
    return (
        [pl.ds(0, row.head_dim)]
        if row.style == "interleaved"
        else [pl.ds(0, half), pl.ds(half, half)]
    )
