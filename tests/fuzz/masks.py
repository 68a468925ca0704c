"""Trees of masks: drawn, formatted as Python, and evaluated pair by pair in plain numpy.

The meaning of each mask is defined again, from its documentation: a function of the positions of
queries [T, 1] and keys [1, S] and of the mask's arguments, which returns bool that broadcasts to
[B, N, T, S].
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """B, T, S, N, K and H of a call."""

    b: int
    t: int
    s: int
    n: int
    k: int
    h: int


class Leaf(NamedTuple):
    """One mask; `kind` is a key of `MEANING`."""

    kind: str
    numbers: tuple[Any, ...] = ()
    offset: int | None = None
    arrays: tuple[str, ...] = ()  # Python that makes them with numpy
    on_device: bool = False  # whether they are jax's

    def text(self) -> str:
        """Write the mask as Python."""
        arrays = [f"jnp.asarray({a})" if self.on_device else a for a in self.arrays]
        words = [*map(repr, self.numbers), *arrays]
        if self.kind in WITH_OFFSET:
            words.append(f"offset={self.offset!r}")
        return f"M.{self.kind.split()[0]}({', '.join(words)})"

    def allowed(self, sizes: Sizes) -> np.ndarray:
        """Evaluate the mask at every pair: bool that broadcasts to [B, N, T, S]."""
        shift = sizes.s - sizes.t if self.offset is None else self.offset
        query, key = np.arange(sizes.t)[:, None] + shift, np.arange(sizes.s)[None, :]
        arrays = (eval(a, {"np": np}) for a in self.arrays)
        return MEANING[self.kind](query, key, *self.numbers, *arrays)


class Node(NamedTuple):
    """Masks joined by "&" or "|", or one negated by "~"."""

    sign: str
    parts: tuple[Any, ...]

    def text(self) -> str:
        """Write the tree as Python."""
        texts = [part.text() for part in self.parts]
        return f"~({texts[0]})" if self.sign == "~" else "(" + f" {self.sign} ".join(texts) + ")"

    def allowed(self, sizes: Sizes) -> np.ndarray:
        """Evaluate the tree at every pair."""
        first, *rest = (part.allowed(sizes) for part in self.parts)
        for other in rest:
            first = first & other if self.sign == "&" else first | other
        return ~first if self.sign == "~" else first


Tree = Leaf | Node


# ---- the meaning of each mask --------------------------------------------------------------------


def _causal(at: Any, key: Any) -> np.ndarray:
    return ~(key > at)


def _window(at: Any, key: Any, left: int | None, right: int | None) -> np.ndarray:
    """Allow at most `left` keys back and `right` ahead."""
    far_back = np.zeros(np.broadcast(at, key).shape, bool) if left is None else key < at - left
    far_ahead = np.zeros(far_back.shape, bool) if right is None else key > at + right
    return ~(far_back | far_ahead)


def _block_causal(at: Any, key: Any, block: int) -> np.ndarray:
    return np.floor_divide(key, block) <= np.floor_divide(at, block)


def _block_window(at: Any, key: Any, block: int, window: int) -> np.ndarray:
    """Allow the query's own block, and `window - 1` blocks before it."""
    back = np.floor_divide(at, block) - np.floor_divide(key, block)
    return (back >= 0) & (back <= window - 1)


def _video(
    at: Any, key: Any, frames: int, tokens: int, size: int, many: int | None, sink: int, alone: bool
) -> np.ndarray:
    """Look up both frames in a table of the frames that each may attend to."""
    ends = [*range(int(alone), frames, size), frames]
    table = np.zeros((frames, frames), bool)
    for frame in range(frames):
        end = min(e for e in ends if e > frame)
        budget = end if many is None else min(many * size, end)
        first = sink if budget < end else 0  # the first frames stay, and the last fill the budget
        table[frame, [*range(first), *range(end - (budget - first), end)]] = True
    return table[np.minimum(at // tokens, frames - 1), key // tokens]


def _rectangles(at: Any, key: Any, corners: tuple[tuple[int, ...], ...]) -> np.ndarray:
    out = np.zeros(np.broadcast(at, key).shape, bool)
    for q_start, q_stop, kv_start, kv_stop in corners:
        out |= (at >= q_start) & (at < q_stop) & (key >= kv_start) & (key < kv_stop)
    return out


def _limit(at: Any, key: Any, count: int) -> np.ndarray:
    return np.broadcast_to(key < count, np.broadcast(at, key).shape)


def _lengths(at: Any, key: Any, counts: Any) -> np.ndarray:
    """Allow the first keys of each batch row; lengths are [B]."""
    each = np.array([int(n) for n in counts], dtype=object).astype(np.float64)
    return np.arange(key.shape[1])[None, None, None, :] < each[:, None, None, None]


def _flags(at: Any, key: Any, real: np.ndarray) -> np.ndarray:
    return real[:, None, None, :]


def _packed(at: Any, key: Any, *lengths: tuple[int, ...]) -> np.ndarray:
    """Allow pairs within segments of these lengths in queries and in keys."""
    q_ids, kv_ids = (np.repeat(np.arange(len(each)), each) for each in lengths)
    return q_ids[:, None] == kv_ids


def _segments(at: Any, key: Any, q_ids: Any, kv_ids: Any) -> np.ndarray:
    """Allow the keys of the query's own segment; a negative id belongs to none."""
    mine, theirs = (np.asarray(x).astype(np.int64) for x in (q_ids, kv_ids))
    return (mine[:, None, :, None] == theirs[:, None, None, :]) & (mine >= 0)[:, None, :, None]


def _dense(at: Any, key: Any, table: np.ndarray) -> np.ndarray:
    """Allow the marked pairs, [T, S], [B, T, S] or [B, N, T, S]."""
    return table[:, None] if table.ndim == 3 else table


MEANING: dict[str, Callable[..., np.ndarray]] = {
    "Causal": _causal, "LocalWindow": _window, "BlockCausal": _block_causal,
    "BlockSlidingWindow": _block_window, "VideoMask": _video, "KeyLimit": _limit,
    "KeyPadding": _lengths, "KeyPadding flags": _flags, "Segments": _segments, "Dense": _dense,
    "Rectangles": _rectangles, "Segments.of_lengths": _packed,
    "Full": lambda at, key: np.ones(np.broadcast(at, key).shape, bool),
    "Empty": lambda at, key: np.zeros(np.broadcast(at, key).shape, bool),
}  # fmt: skip
WITH_OFFSET = ("Causal", "LocalWindow", "BlockCausal", "BlockSlidingWindow", "VideoMask")


# ---- draws ---------------------------------------------------------------------------------------

SIGNED, UNSIGNED = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32")


def draw_tree(rng: Random, sizes: Sizes, depth: int = 3, data: bool = True) -> Tree:
    """Draw a tree of at most `depth` nested operators; without `data`, of masks of positions."""
    if depth == 0 or rng.random() < 0.5:
        kinds = [_draw_positions] * 3 + [_draw_limit, _draw_video, _draw_own_blocks]
        kinds += [_draw_rectangles, _draw_packed, lambda *_: Leaf(rng.choice(["Full", "Empty"]))]
        kinds += [_draw_lengths, _draw_flags, _draw_segments, _draw_dense] if data else []
        return rng.choice(kinds)(rng, sizes)
    sign = rng.choice("&&||~")
    parts = (draw_tree(rng, sizes, depth - 1, data) for _ in range(1 if sign == "~" else 2))
    return Node(sign, tuple(parts))


def _draw_positions(rng: Random, sizes: Sizes) -> Leaf:
    kind = rng.choice(["Causal", "LocalWindow", "BlockCausal", "BlockSlidingWindow"])
    block, side = rng.choice([1, 2, 3, 5, 8, 16, 64]), [None, 0, 1, 2, 7, 30, 200]
    numbers = {
        "Causal": (),
        "LocalWindow": (rng.choice(side), rng.choice(side)),
        "BlockCausal": (block,),
        "BlockSlidingWindow": (block, rng.choice([1, 2, 3, 9])),
    }[kind]
    offsets = [0, 0, 1, -1, 3, -4, sizes.s - sizes.t, rng.randint(-20, sizes.s + 5)]
    is_default = sizes.t <= sizes.s and rng.random() < 0.5
    return Leaf(kind, numbers, None if is_default else rng.choice(offsets))


def _draw_own_blocks(rng: Random, sizes: Sizes) -> Leaf:
    """Draw blocks that attend only to themselves and divide the queries."""
    fits = [n for n in range(2, sizes.t // 2 + 1) if sizes.t % n == 0]
    return Leaf("BlockSlidingWindow", (rng.choice(fits), 1), 0) if fits else _draw_limit(rng, sizes)


def _draw_limit(rng: Random, sizes: Sizes) -> Leaf:
    return Leaf("KeyLimit", (rng.choice([0, 1, sizes.s, sizes.s + 3, rng.randint(0, sizes.s)]),))


def _draw_rectangles(rng: Random, sizes: Sizes) -> Leaf:
    """Draw a union of few or of many rectangles, small or of any size."""
    corners = []
    for _ in range(rng.choice([1, 3, 33, 100])):
        q, kv = rng.randint(0, sizes.t), rng.randint(0, sizes.s)
        most = rng.choice([1, 3, 20, sizes.t + sizes.s])
        corners.append((q, q + rng.randint(0, most), kv, kv + rng.randint(0, most)))
    return Leaf("Rectangles", (tuple(corners),), 0)


def _draw_packed(rng: Random, sizes: Sizes) -> Leaf:
    """Draw segments that cover all queries and all keys, some of them empty."""
    cuts = sorted(rng.random() for _ in range(rng.randint(0, 5)))
    both = (np.diff([0, *(int(n * cut) for cut in cuts), n]) for n in (sizes.t, sizes.s))
    return Leaf("Segments.of_lengths", tuple(tuple(lengths.tolist()) for lengths in both))


def _draw_video(rng: Random, sizes: Sizes) -> Leaf:
    """Draw a video whose tokens are the keys and include the queries."""
    if sizes.t > sizes.s:
        return _draw_positions(rng, sizes)
    tokens = rng.choice([n for n in (1, 2, 3, 4, 5, 8, 16, 13) if sizes.s % n == 0])
    size, window = rng.choice([1, 2, 3]), rng.choice([None, 1, 2, 3, 4])
    sink = 0 if window is None else rng.randint(0, min(3, (window - 1) * size))
    numbers = (sizes.s // tokens, tokens, size, window, sink, rng.random() < 0.3)
    return Leaf("VideoMask", numbers, rng.choice([None, 0, rng.randint(0, sizes.s - sizes.t)]))


def _draw_lengths(rng: Random, sizes: Sizes) -> Leaf:
    dtype = rng.choice([*SIGNED, *UNSIGNED, "int32", "int32", "uint64"])
    most = int(np.iinfo(dtype).max)
    odd = [0, 1, min(sizes.s, most)]
    if rng.random() < 0.1:  # refused, if the call reads them
        odd += [min(sizes.s + 9, most), most, *[-1] * (dtype in SIGNED)]
    counts = [
        rng.choice(odd) if rng.random() < 0.3 else min(rng.randint(1, sizes.s), most)
        for _ in range(rng.choice([sizes.b, sizes.b, 1]))
    ]
    return _leaf_of_ids(rng, "KeyPadding", dtype, f"np.array({counts}, {dtype!r})")


def _draw_segments(rng: Random, sizes: Sizes) -> Leaf:
    dtype, low = rng.choice([*SIGNED, "uint8", "uint32"]), rng.choice([0, 0, -1])
    low, many = (low if dtype in SIGNED else 0), rng.choice([1, 2, 4])
    shift = rng.choice([0, 0, 0, int(np.iinfo(dtype).max) - 5])
    batch = rng.choice([sizes.b, 1])
    ids = [
        f"(np.floor({_random(rng, (batch, n))} * {many}).astype('int64') + {low + shift})"
        f".astype({dtype!r})"
        for n in (sizes.t, sizes.s)
    ]
    return _leaf_of_ids(rng, "Segments", dtype, *ids)


def _leaf_of_ids(rng: Random, kind: str, dtype: str, *arrays: str) -> Leaf:
    """Draw ids; arrays of 64 bits stay in numpy, because jax has none here."""
    on_device = not dtype.endswith("64") and rng.random() < 0.5
    return Leaf(kind, (), None, arrays, on_device)


def _random(rng: Random, shape: tuple[int, ...]) -> str:
    return f"np.random.default_rng({rng.randrange(10**6)}).random({shape})"


def _draw_flags(rng: Random, sizes: Sizes) -> Leaf:
    array = f"({_random(rng, (sizes.b, sizes.s))} < {rng.choice([0.0, 0.2, 0.7, 0.95, 2.0])})"
    return Leaf("KeyPadding flags", (), None, (array,), rng.random() < 0.5)


def _draw_dense(rng: Random, sizes: Sizes) -> Leaf:
    full = (sizes.b, sizes.n, sizes.t, sizes.s)
    rank = rng.choice([2, 3, 4])
    shape = full[2:] if rank == 2 else (full[0], *full[2:]) if rank == 3 else full
    shape = tuple(1 if rng.random() < 0.2 else n for n in shape)
    array = f"({_random(rng, shape)} < {rng.choice([0.1, 0.5, 0.9])})"
    return Leaf("Dense", (), None, (array,), rng.random() < 0.5)
