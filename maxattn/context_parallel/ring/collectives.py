"""What a ring sends, as values for the plan: hops of K, V and their gradients, and the deal to
zig-zag and back.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import jax

from maxattn.call import Call
from maxattn.context_parallel.base import Collective, bias_letters, itemsize
from maxattn.sharding import MeshShape, ways

if TYPE_CHECKING:
    from maxattn.context_parallel.ring.ring import Ring

CONTEXT = ("context",)


def hops_of(
    place: Call, sends: int, runs: int, direct: bool = False, room: int = 0
) -> tuple[Collective, ...]:
    """Name the hops: K and V forward and backward, and their gradients, which go one further, home.

    Args:
        place: the call of one hop.
        sends: hops after the first.
        runs: parts of the sequence that a place holds, each an array of its own.
        direct: whether K and V are one array, and gradients go straight home in K's dtype, but for
            a place's own.
        room: keys more that a block has room for.
    """
    size = 2 * place.batch * (place.kv_len + room) * place.kv_heads * place.head_dim
    item = itemsize(place.dtype)
    home = sends if direct else sends + 1
    moved = sends * size * item
    made = (
        ("K,V", "forward", moved, sends),
        ("K,V", "backward", moved, sends),
        ("dK,dV", "backward", moved if direct else home * size * 4, home),
    )
    arrays = 1 if direct else 2 * runs
    return tuple(Collective("ppermute", CONTEXT, *each, arrays) for each in made if sends)


def dealt(call: Call, place: Call, shape: MeshShape, ring: Ring) -> tuple[Collective, ...]:
    """Name the permutes to zig-zag and back: two for every array, each of half of it.

    Args:
        call: the global, padded call.
        place: the call of one hop.
        shape: the mesh's axes.
        ring: the strategy.
    """
    rows = place.batch * place.q_len * place.heads
    q, lse = rows * place.head_dim * itemsize(place.dtype), rows * 4
    kv = place.batch * place.kv_len * place.kv_heads * place.head_dim * itemsize(place.dtype)
    shares = _extras(call, shape, ring)
    words = "".join(f",{name}" for name in dict.fromkeys(name for name, _ in shares))
    extra, number = sum(size for _, size in shares), len(shares)
    dbias = next(
        (
            2 * size if itemsize(call.dtype) == 2 else size
            for name, size in shares
            if name == "bias"
        ),
        0,
    )
    back = (
        "dQ,dK,dV" + (",dbias" if dbias else ""),
        "backward",
        q + 2 * kv + dbias,
        3 + bool(dbias),
    )
    moves = (
        ("Q,K,V" + words, "forward", q + 2 * kv + extra, 3 + number, "to"),
        ("out,LSE", "forward", q + lse, 2, "from"),
        (
            "Q,K,V,out,dout,LSE,dLSE" + words,
            "backward",
            3 * q + 2 * kv + 2 * lse + extra,
            7 + number,
            "to",
        ),
        (*back, "from"),
    )
    return tuple(
        Collective("ppermute", CONTEXT, f"{what} {way} zig-zag", when, size, 2, arrays)
        for what, when, size, arrays, way in moves
    )


def _extras(call: Call, shape: MeshShape, ring: Ring) -> list[tuple[str, int]]:
    """Name what else has a query axis, a bias or the mask's arrays, with this device's bytes of
    it.
    """
    letters = bias_letters(call.bias)
    found = [("bias", _share(call.bias or (), letters, shape, ring) * 4)] if "T" in letters else []
    leaves, axes = jax.tree.leaves(call.mask), jax.tree.leaves(call.mask.leaf_axes())
    return found + [
        ("mask", _share(x.shape, a, shape, ring) * x.dtype.itemsize)
        for x, a in zip(leaves, axes, strict=True) if "T" in a
    ]  # fmt: skip


def _share(sizes: tuple[int, ...], letters: str, shape: MeshShape, ring: Ring) -> int:
    parts = {"T": ring.places, "B": ways("B", shape), "N": ring.head_ways()}
    return prod(-(-n // parts.get(letter, 1)) for n, letter in zip(sizes, letters, strict=True))
