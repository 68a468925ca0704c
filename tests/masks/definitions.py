"""What each mask means, one pair at a time, in plain Python; and hypothesis strategies that draw
masks.

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
    """Tell whether the query at index q may attend to key k; `shift` is kv_len - q_len, the offset
    that None means.
    """
    kind, *rest = spec
    if kind == "and":
        return all(meaning(s, q, k, shift) for s in rest)
    if kind == "or":
        return any(meaning(s, q, k, shift) for s in rest)
    if kind == "not":
        return not meaning(rest[0], q, k, shift)
    return LEAVES[kind](q, k, shift, *rest)


def _at(q: int, shift: int, offset: int | None) -> int:
    return q + (shift if offset is None else offset)


def _causal(q: int, k: int, shift: int, offset: int | None) -> bool:
    return k <= _at(q, shift, offset)


def _local(
    q: int, k: int, shift: int, left: int | None, right: int | None, offset: int | None
) -> bool:
    p = _at(q, shift, offset)
    return (left is None or p - k <= left) and (right is None or k - p <= right)


def _block_causal(q: int, k: int, shift: int, block: int, offset: int | None) -> bool:
    return k // block <= _at(q, shift, offset) // block


def _block_window(q: int, k: int, shift: int, block: int, window: int, offset: int | None) -> bool:
    return 0 <= _at(q, shift, offset) // block - k // block < window


def _block_of_frame(frame: int, size: int, alone: bool) -> int:
    if alone:
        return 0 if frame == 0 else 1 + (frame - 1) // size
    return frame // size


def _video(
    q: int,
    k: int,
    shift: int,
    frames: int,
    tokens: int,
    size: int,
    window: int | None,
    sink: int,
    alone: bool,
    offset: int | None,
) -> bool:
    mine, theirs = _at(q, shift, offset) // tokens, k // tokens
    block = _block_of_frame(mine, size, alone)
    seen = [f for f in range(frames) if _block_of_frame(f, size, alone) <= block]
    if window is not None and len(seen) > window * size:
        recent = window * size - sink
        seen = seen[:sink] + seen[len(seen) - recent :]
    return theirs in seen


def _segments(q: int, k: int, shift: int, lengths: list[int], kv_lengths: list[int]) -> bool:
    of_query = [i for i, n in enumerate(lengths) for _ in range(n)]
    of_key = [i for i, n in enumerate(kv_lengths) for _ in range(n)]
    return of_query[q] == of_key[k]


def _rectangle(q: int, k: int, shift: int, q0: int, q1: int, k0: int, k1: int) -> bool:
    return q in range(q0, q1) and k in range(k0, k1)


LEAVES = {
    "full": lambda q, k, shift: True,
    "empty": lambda q, k, shift: False,
    "limit": lambda q, k, shift, n: k < n,
    "causal": _causal,
    "local": _local,
    "block_causal": _block_causal,
    "block_window": _block_window,
    "video": _video,
    "segments": _segments,
    "rectangle": _rectangle,
}
MAKERS = {
    "full": M.Full,
    "empty": M.Empty,
    "limit": M.KeyLimit,
    "causal": M.Causal,
    "local": M.LocalWindow,
    "block_causal": M.BlockCausal,
    "block_window": M.BlockSlidingWindow,
    "video": M.VideoMask,
    "segments": M.Segments.of_lengths,
    "rectangle": M.Rectangle,
}


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
    return np.array(
        [[meaning(spec, q, k, kv_len - q_len) for k in range(kv_len)] for q in range(q_len)],
        dtype=bool,
    )


def leaves(q_len: int, kv_len: int) -> st.SearchStrategy[Spec]:
    """Draw single masks."""
    offset: st.SearchStrategy[int | None] = st.integers(0, 40)
    offset = offset | st.none() if q_len <= kv_len else offset
    side, block = st.none() | st.integers(0, 30), st.integers(1, 17)
    kinds = [
        st.just(("full",)),
        st.just(("empty",)),
        st.tuples(st.just("limit"), st.integers(0, kv_len + 3)),
        st.tuples(st.just("causal"), offset | st.integers(-10, -1)),
        st.tuples(st.just("local"), side, side, offset | st.integers(-10, -1)),
        st.tuples(st.just("block_causal"), block, offset | st.integers(-10, -1)),
        st.tuples(st.just("block_window"), block, st.integers(1, 5), offset | st.integers(-10, -1)),
    ]
    kinds.append(st.builds(_sorted_rectangle, _run(q_len), _run(kv_len)))
    return st.one_of(*kinds, _packed(q_len, kv_len), *_videos(kv_len, offset))


def _run(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, length + 3), min_size=2, max_size=2).map(sorted)


def _sorted_rectangle(queries: list[int], keys: list[int]) -> Spec:
    return ("rectangle", *queries, *keys)


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
