"""The meaning of each mask, one pair at a time, in plain Python; and strategies that draw masks.

Nothing here uses intervals or anything else of maxattn's own: a mask is an expression of nested
tuples, `meaning` looks at one query and one key, and `build` makes the mask that should agree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from maxattn import masks as M

Spec = tuple[Any, ...]


def meaning(spec: Spec, q: int, k: int, shift: int) -> bool:
    """Return whether the query at index q may attend to key k; `shift`, kv_len - q_len, is the
    offset that None means.
    """
    kind, *rest = spec
    if kind == "and":
        return all(meaning(s, q, k, shift) for s in rest)
    if kind == "or":
        return any(meaning(s, q, k, shift) for s in rest)
    if kind == "not":
        return not meaning(rest[0], q, k, shift)
    if kind in AT_AN_OFFSET:
        *rest, offset = rest
        return AT_AN_OFFSET[kind](q + (shift if offset is None else offset), k, *rest)
    return FIXED[kind](q, k, *rest)


def _local(q: int, k: int, left: int | None, right: int | None) -> bool:
    return (left is None or q - k <= left) and (right is None or k - q <= right)


def _block_of_frame(frame: int, size: int, alone: bool) -> int:
    return (frame and 1 + (frame - 1) // size) if alone else frame // size


def _video(q: int, k: int, frames: int, tokens: int, size: int, window: Any, *more: Any) -> bool:
    (sink, alone), mine, theirs = more, q // tokens, k // tokens
    block = _block_of_frame(mine, size, alone)
    seen = [f for f in range(frames) if _block_of_frame(f, size, alone) <= block]
    if window is not None and len(seen) > window * size:
        recent = window * size - sink
        seen = seen[:sink] + seen[len(seen) - recent :]
    return theirs in seen


def _segments(q: int, k: int, *lengths: list[int]) -> bool:
    of_query, of_key = ([i for i, n in enumerate(each) for _ in range(n)] for each in lengths)
    return of_query[q] == of_key[k]


AT_AN_OFFSET = {
    "causal": lambda q, k: k <= q,
    "local": _local,
    "block_causal": lambda q, k, block: k // block <= q // block,
    "block_window": lambda q, k, block, window: 0 <= q // block - k // block < window,
    "video": _video,
}
FIXED = {
    "full": lambda q, k: True,
    "empty": lambda q, k: False,
    "limit": lambda q, k, n: k < n,
    "segments": _segments,
    "rectangle": lambda q, k, q0, q1, k0, k1: q in range(q0, q1) and k in range(k0, k1),
}
MAKERS = {
    "full": M.Full, "empty": M.Empty, "limit": M.KeyLimit, "causal": M.Causal,
    "local": M.LocalWindow, "block_causal": M.BlockCausal, "block_window": M.BlockSlidingWindow,
    "video": M.VideoMask, "segments": M.Segments.of_lengths, "rectangle": M.Rectangle,
}  # fmt: skip


def build(spec: Spec) -> M.Mask:
    """Make the mask of an expression with the operators of the algebra."""
    kind, *rest = spec
    if kind == "not":
        return ~build(rest[0])
    if kind in ("and", "or"):
        a, b = map(build, rest)
        return a & b if kind == "and" else a | b
    return MAKERS[kind](*rest)


def table(spec: Spec, q_len: int, kv_len: int) -> np.ndarray:
    """Ask for every pair: bool [q_len, kv_len]."""
    keys, shift = range(kv_len), kv_len - q_len
    return np.array([[meaning(spec, q, k, shift) for k in keys] for q in range(q_len)], dtype=bool)


def leaves(q_len: int, kv_len: int) -> st.SearchStrategy[Spec]:
    """Draw single masks."""
    offset: st.SearchStrategy[int | None] = st.integers(0, 40)
    offset = offset | st.none() if q_len <= kv_len else offset
    any_offset = offset | st.integers(-10, -1)
    side, block = st.none() | st.integers(0, 30), st.integers(1, 17)
    runs = (st.lists(st.integers(0, n + 3), min_size=2, max_size=2) for n in (q_len, kv_len))
    kinds = [
        st.just(("full",)),
        st.just(("empty",)),
        st.tuples(st.just("limit"), st.integers(0, kv_len + 3)),
        st.tuples(st.just("causal"), any_offset),
        st.tuples(st.just("local"), side, side, any_offset),
        st.tuples(st.just("block_causal"), block, any_offset),
        st.tuples(st.just("block_window"), block, st.integers(1, 5), any_offset),
        st.builds(lambda q, k: ("rectangle", *sorted(q), *sorted(k)), *runs),
    ]
    return st.one_of(*kinds, _packed(q_len, kv_len), *_videos(kv_len, offset))


@st.composite
def _packed(draw: st.DrawFn, q_len: int, kv_len: int) -> Spec:
    """Segments of all queries and of all keys, some of them empty."""
    count = draw(st.integers(1, 6))
    cuts = st.lists(st.integers(0, 1000), min_size=count - 1, max_size=count - 1)
    both = (np.diff([0, *sorted(n * c // 1000 for c in draw(cuts)), n]) for n in (q_len, kv_len))
    return ("segments", *(tuple(lengths.tolist()) for lengths in both))


def _videos(kv_len: int, offset: st.SearchStrategy[int | None]) -> list[st.SearchStrategy[Spec]]:
    """Videos whose tokens are the keys, with queries that lie inside the video."""
    out = []
    for tokens in (n for n in (1, 2, 3, 5, 8) if kv_len % n == 0):
        for size in (1, 2, 3):
            for window in (None, 1, 2, 4):
                sink = st.integers(0, 3 if window is None else min(3, (window - 1) * size))
                numbers = (st.just(x) for x in ("video", kv_len // tokens, tokens, size, window))
                out.append(st.tuples(*numbers, sink, st.booleans(), offset))
    return [st.one_of(out)] if out else []


def specs(q_len: int, kv_len: int) -> st.SearchStrategy[Spec]:
    """Draw expressions of up to five masks."""

    def grow(inner: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
        pairs = st.tuples(st.sampled_from(["and", "or"]), inner, inner)
        return pairs | st.tuples(st.just("not"), inner)

    return st.recursive(leaves(q_len, kv_len), grow, max_leaves=5)


@st.composite
def cases(draw: st.DrawFn, most: int = 40) -> tuple[Spec, int, int]:
    """Draw an expression with lengths that it fits."""
    q_len, kv_len = draw(st.integers(1, most)), draw(st.integers(1, most))
    return draw(specs(q_len, kv_len)), q_len, kv_len


def calls(run: Callable[[], Any]) -> int:
    """Count the functions that Python calls, those of C as well."""
    count = 0

    def called(_frame: Any, event: str, _of: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
