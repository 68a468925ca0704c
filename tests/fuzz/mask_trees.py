"""Trees of masks: drawn, written as Python, and evaluated pair by pair."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz import mask_leaves


class Sizes(NamedTuple):
    """Hold B, T, S, N, K and H of a call."""

    b: int
    t: int
    s: int
    n: int
    k: int
    h: int


class Leaf(NamedTuple):
    """Hold one mask.

    Args:
        kind: of `mask_leaves`.
        numbers: its plain arguments.
        offset: of masks that have one: a number, or None.
        arrays: Python that makes its arrays with numpy.
        on_device: whether the arrays are jax's.
    """

    kind: str
    numbers: tuple[Any, ...] = ()
    offset: int | None = None
    arrays: tuple[str, ...] = ()
    on_device: bool = False

    def text(self) -> str:
        """Write it as Python."""
        arrays = [f"jnp.asarray({a})" if self.on_device else a for a in self.arrays]
        words = [*map(repr, self.numbers), *arrays]
        if self.kind in mask_leaves.WITH_OFFSET:
            words.append(f"offset={self.offset!r}")
        return f"M.{self.kind.split()[0]}({', '.join(words)})"

    def allowed(self, sizes: Sizes) -> np.ndarray:
        """Evaluate it at every pair: bool that broadcasts to [B, N, T, S]."""
        query, key = np.arange(sizes.t)[:, None], np.arange(sizes.s)[None, :]
        if self.kind in mask_leaves.WITH_OFFSET:
            shift = sizes.s - sizes.t if self.offset is None else self.offset
            return mask_leaves.WITH_OFFSET[self.kind](query + shift, key, *self.numbers)
        held = (eval(a, {"np": np}) for a in self.arrays)
        return mask_leaves.OF_INDEX[self.kind](query, key, *self.numbers, *held)


class Node(NamedTuple):
    """Join masks by "&" or "|", or negate one by "~"."""

    sign: str
    parts: tuple[Any, ...]

    def text(self) -> str:
        """Write it as Python."""
        texts = [part.text() for part in self.parts]
        return f"~({texts[0]})" if self.sign == "~" else "(" + f" {self.sign} ".join(texts) + ")"

    def allowed(self, sizes: Sizes) -> np.ndarray:
        """Evaluate it at every pair."""
        first, *rest = (part.allowed(sizes) for part in self.parts)
        for other in rest:
            first = first & other if self.sign == "&" else first | other
        return ~first if self.sign == "~" else first


Tree = Leaf | Node


def leaves(tree: Tree) -> list[Leaf]:
    """List the masks of a tree."""
    if isinstance(tree, Leaf):
        return [tree]
    return [leaf for part in tree.parts for leaf in leaves(part)]


def draw_tree(rng: Random, sizes: Sizes, depth: int = 3, data: bool = True) -> Tree:
    """Draw a tree of at most `depth` signs above each other; without `data`, of positions alone."""
    if depth == 0 or rng.random() < 0.5:
        return draw_leaf(rng, sizes, data)
    sign = rng.choice("&&||~")
    parts = (draw_tree(rng, sizes, depth - 1, data) for _ in range(1 if sign == "~" else 2))
    return Node(sign, tuple(parts))


def draw_leaf(rng: Random, sizes: Sizes, data: bool = True) -> Leaf:
    """Draw one mask that fits the sizes."""
    kinds = [_positions, _positions, _positions, _limit, _video, _own_blocks]
    return rng.choice([*kinds, _lengths, _flags, _segments, _dense] if data else kinds)(rng, sizes)


def _offset(rng: Random, sizes: Sizes) -> int | None:
    if sizes.t <= sizes.s and rng.random() < 0.5:
        return None
    return rng.choice([0, 0, 1, -1, 3, -4, sizes.s - sizes.t, rng.randint(-20, sizes.s + 5)])


def _positions(rng: Random, sizes: Sizes) -> Leaf:
    kind = rng.choice(["Causal", "LocalWindow", "BlockCausal", "BlockSlidingWindow"])
    block, side = rng.choice([1, 2, 3, 5, 8, 16, 64]), [None, 0, 1, 2, 7, 30, 200]
    numbers = {
        "Causal": (),
        "LocalWindow": (rng.choice(side), rng.choice(side)),
        "BlockCausal": (block,),
        "BlockSlidingWindow": (block, rng.choice([1, 2, 3, 9])),
    }[kind]
    return Leaf(kind, numbers, _offset(rng, sizes))


def _own_blocks(rng: Random, sizes: Sizes) -> Leaf:
    """Draw blocks that see themselves alone, of which the queries are a whole number."""
    fits = [n for n in range(2, sizes.t // 2 + 1) if sizes.t % n == 0]
    return Leaf("BlockSlidingWindow", (rng.choice(fits), 1), 0) if fits else _limit(rng, sizes)


def _limit(rng: Random, sizes: Sizes) -> Leaf:
    return Leaf("KeyLimit", (rng.choice([0, 1, sizes.s, sizes.s + 3, rng.randint(0, sizes.s)]),))


def _video(rng: Random, sizes: Sizes) -> Leaf:
    """Draw a video whose tokens are the keys, with its queries inside."""
    if sizes.t > sizes.s:
        return _positions(rng, sizes)
    tokens = rng.choice([n for n in (1, 2, 3, 4, 5, 8, 16, 13) if sizes.s % n == 0])
    size, window = rng.choice([1, 2, 3]), rng.choice([None, 1, 2, 3, 4])
    sink = 0 if window is None else rng.randint(0, min(3, (window - 1) * size))
    numbers = (sizes.s // tokens, tokens, size, window, sink, rng.random() < 0.3)
    return Leaf("VideoMask", numbers, rng.choice([None, 0, rng.randint(0, sizes.s - sizes.t)]))


# ---- with arrays ---------------------------------------------------------------------------------

SIGNED, UNSIGNED = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32")


def _is_wide(dtype: str) -> bool:
    return dtype.endswith("64")


def _lengths(rng: Random, sizes: Sizes) -> Leaf:
    dtype = rng.choice([*SIGNED, *UNSIGNED, "int32", "int32", "uint64"])
    most = int(np.iinfo(dtype).max)
    odd = [0, 1, min(sizes.s, most), min(sizes.s + 9, most), most] + (
        [-1] if dtype in SIGNED else []
    )
    counts = [
        rng.choice(odd) if rng.random() < 0.3 else min(rng.randint(1, sizes.s), most)
        for _ in range(rng.choice([sizes.b, sizes.b, 1]))
    ]
    array = f"np.array({counts}, {dtype!r})"
    return Leaf("KeyPadding", (), None, (array,), not _is_wide(dtype) and rng.random() < 0.5)


def _random(rng: Random, shape: tuple[int, ...]) -> str:
    return f"np.random.default_rng({rng.randrange(10**6)}).random({shape})"


def _flags(rng: Random, sizes: Sizes) -> Leaf:
    array = f"({_random(rng, (sizes.b, sizes.s))} < {rng.choice([0.0, 0.2, 0.7, 0.95, 2.0])})"
    return Leaf("KeyPadding flags", (), None, (array,), rng.random() < 0.5)


def _segments(rng: Random, sizes: Sizes) -> Leaf:
    dtype, low = rng.choice([*SIGNED, "uint8", "uint32"]), rng.choice([0, 0, -1])
    low, many = (low if dtype in SIGNED else 0), rng.choice([1, 2, 4])
    shift = rng.choice([0, 0, 0, int(np.iinfo(dtype).max) - 5])
    batch = rng.choice([sizes.b, 1])
    arrays = tuple(
        f"(np.floor({_random(rng, (batch, n))} * {many}).astype('int64') + {low + shift})"
        f".astype({dtype!r})"
        for n in (sizes.t, sizes.s)
    )
    return Leaf("Segments", (), None, arrays, not _is_wide(dtype) and rng.random() < 0.5)


def _dense(rng: Random, sizes: Sizes) -> Leaf:
    full = (sizes.b, sizes.n, sizes.t, sizes.s)
    rank = rng.choice([2, 3, 4])
    shape = full[2:] if rank == 2 else (full[0], *full[2:]) if rank == 3 else full
    shape = tuple(1 if rng.random() < 0.2 else n for n in shape)
    array = f"({_random(rng, shape)} < {rng.choice([0.1, 0.5, 0.9])})"
    return Leaf("Dense", (), None, (array,), rng.random() < 0.5)
