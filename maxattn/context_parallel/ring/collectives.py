"""What a ring sends, as values for the plan: the hops, and the permutes to zig-zag and back."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import jax

from maxattn.call import Call
from maxattn.context_parallel.base import CONTEXT, Collective, bias_letters, itemsize
from maxattn.kernels.bias_level import level_shape
from maxattn.sharding import MeshShape, ways

AXES = (CONTEXT,)


def kv_bytes(call: Call, size: int) -> int:
    """Count the bytes of K and V of a call, in elements of `size` bytes."""
    channels = call.head_dim + call.value_dim
    return call.batch * call.kv_len * call.kv_heads * channels * size


def packed_bytes(call: Call, size: int) -> int:
    """Count the bytes of K and V as one array, in which the narrower is as wide as the other."""
    widest = max(call.head_dim, call.value_dim)
    return 2 * call.batch * call.kv_len * call.kv_heads * widest * size


def hop_collectives(
    sends: int, block: int, home: tuple[int, int], arrays: int
) -> tuple[Collective, ...]:
    """Name the hops of K and V, forward and backward, and of their gradients.

    Args:
        sends: hops after the first.
        block: bytes of K and V of a hop.
        home: hops of dK and dV, and the bytes of each.
        arrays: that travel in each hop.
    """
    hops, grads = home
    made = (
        ("K,V", "forward", sends * block, sends),
        ("K,V", "backward", sends * block, sends),
        ("dK,dV", "backward", hops * grads, hops),
    )
    return tuple(Collective("ppermute", AXES, *each, arrays) for each in made)


class Shares(NamedTuple):
    """Say into how many parts the axes of a mask or bias are split.

    Args:
        ring_size: ranks of the ring, which split the queries.
        head_ways: devices that split the heads.
        shape: the mesh's axes.
    """

    ring_size: int
    head_ways: int
    shape: MeshShape

    def elements(self, sizes: tuple[int, ...], letters: str) -> int:
        """Count the elements of one device's share of an array."""
        parts = {"T": self.ring_size, "B": ways("B", self.shape), "N": self.head_ways}
        return prod(-(-n // parts.get(letter, 1)) for n, letter in zip(sizes, letters, strict=True))


class _Bytes(NamedTuple):
    """The bytes of a device's share of each array that is permuted to zig-zag.

    A bias counts as float32: a call does not know its dtype. Its gradient and its level
    are float32.
    """

    q: int
    kv: int
    out: int
    lse: int
    bias: int
    level: int
    masks: tuple[int, ...]

    @property
    def extra(self) -> int:
        return self.bias + self.level + sum(self.masks)

    @property
    def words(self) -> str:
        present = ("bias", self.bias), ("bias level", self.level), ("mask", self.masks)
        return "".join(f",{word}" for word, size in present if size)

    @property
    def arrays(self) -> int:
        return bool(self.bias) + bool(self.level) + len(self.masks)


def zigzag_collectives(call: Call, local: Call, shares: Shares) -> tuple[Collective, ...]:
    """Name the permutes to zig-zag and back: two for every array, each of half of it.

    Args:
        call: the global, padded call.
        local: the call of one hop.
        shares: how masks and biases are split.
    """
    b = _bytes(call, local, shares)
    moves = (
        (f"Q,K,V{b.words} to", "forward", b.q + b.kv + b.extra, 3 + b.arrays),
        ("out,LSE from", "forward", b.out + b.lse, 2),
        (
            f"Q,K,V,out,dout,LSE,dLSE{b.words} to", "backward",
            b.q + 2 * b.out + b.kv + 2 * b.lse + b.extra, 7 + b.arrays,
        ),
        (
            f"dQ,dK,dV{',dbias' if b.bias else ''} from", "backward",
            b.q + b.kv + b.bias, 3 + bool(b.bias),
        ),
    )  # fmt: skip
    return tuple(
        Collective("ppermute", AXES, f"{what} zig-zag", when, size, 2, arrays)
        for what, when, size, arrays in moves
    )


def _bytes(call: Call, local: Call, shares: Shares) -> _Bytes:
    item, rows = itemsize(local.dtype), local.batch * local.q_len * local.heads
    q, out = (rows * dim * item for dim in (local.head_dim, local.value_dim))
    kv, masks = kv_bytes(local, item), _mask_bytes(call, shares)
    return _Bytes(q, kv, out, rows * 4, *_bias_bytes(call, shares), masks)


def _bias_bytes(call: Call, shares: Shares) -> tuple[int, int]:
    """Count the bytes of the bias and of its level, where they have a query axis."""
    if call.bias is None:
        return 0, 0
    both = call.bias, level_shape(call.bias, call.mask, call.q_len)
    sizes = ((shape, bias_letters(shape)) for shape in both)
    bias, level = (4 * shares.elements(*x) if "T" in x[1] else 0 for x in sizes)
    return bias, level


def _mask_bytes(call: Call, shares: Shares) -> tuple[int, ...]:
    """Count the bytes of the mask's arrays that have a query axis."""
    leaves, axes = jax.tree.leaves(call.mask), jax.tree.leaves(call.mask.leaf_axes())
    return tuple(
        shares.elements(x.shape, letters) * x.dtype.itemsize
        for x, letters in zip(leaves, axes, strict=True) if "T" in letters
    )  # fmt: skip
