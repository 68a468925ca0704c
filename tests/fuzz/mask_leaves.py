"""What each kind of mask means, from its page: which keys a query may attend to, in plain numpy.

A leaf is (kind, arguments). Every function gets the positions of queries [T, 1] and keys [1, S]
and the leaf's arguments, and returns bool that broadcasts to [B, N, T, S].
"""

from __future__ import annotations

from typing import Any

import numpy as np

Bool = np.ndarray


def causal(at: Any, key: Any) -> Bool:
    """No key after the query."""
    return ~(key > at)


def window(at: Any, key: Any, left: int | None, right: int | None) -> Bool:
    """At most `left` keys back and `right` ahead."""
    far_back = np.zeros(np.broadcast(at, key).shape, bool) if left is None else key < at - left
    far_ahead = np.zeros(far_back.shape, bool) if right is None else key > at + right
    return ~(far_back | far_ahead)


def block_causal(at: Any, key: Any, block: int) -> Bool:
    """No key of a later block."""
    return np.floor_divide(key, block) <= np.floor_divide(at, block)


def block_window(at: Any, key: Any, block: int, window: int) -> Bool:
    """The query's own block, and `window - 1` before it."""
    back = np.floor_divide(at, block) - np.floor_divide(key, block)
    return (back >= 0) & (back <= window - 1)


def video(
    at: Any, key: Any, frames: int, tokens: int, size: int, many: int | None, sink: int, alone: bool
) -> Bool:
    """Look the frames of both up in a table of frames."""
    sees = _frames(frames, size, many, sink, alone)
    return sees[np.minimum(at // tokens, frames - 1), key // tokens]


def _frames(frames: int, size: int, many: int | None, sink: int, alone: bool) -> Bool:
    """Tell for each frame which frames it sees: bool [frames, frames]."""
    ends = [*range(int(alone), frames, size), frames]
    table = np.zeros((frames, frames), bool)
    for frame in range(frames):
        end = min(e for e in ends if e > frame)
        table[frame, _seen(end, None if many is None else many * size, sink)] = True
    return table


def _seen(end: int, budget: int | None, sink: int) -> list[int]:
    """List the frames before `end` within a budget, of which the first `sink` stay."""
    if budget is None or end <= budget:
        return list(range(end))
    return [*range(sink), *range(end - (budget - sink), end)]


def limit(at: Any, key: Any, count: int) -> Bool:
    """The first keys."""
    return np.broadcast_to(key < count, np.broadcast(at, key).shape)


def lengths(at: Any, key: Any, counts: Any) -> Bool:
    """The first keys of each example, [B]."""
    each = np.array([int(n) for n in counts], dtype=object).astype(np.float64)
    return np.arange(key.shape[1])[None, None, None, :] < each[:, None, None, None]


def flags(at: Any, key: Any, real: Bool) -> Bool:
    """The keys that are marked, [B, S]."""
    return real[:, None, None, :]


def segments(at: Any, key: Any, q_ids: Any, kv_ids: Any) -> Bool:
    """The keys of the query's own segment; a negative id belongs to none."""
    mine, theirs = (np.asarray(x).astype(np.int64) for x in (q_ids, kv_ids))
    return (mine[:, None, :, None] == theirs[:, None, None, :]) & (mine >= 0)[:, None, :, None]


def dense(at: Any, key: Any, table: Bool) -> Bool:
    """The pairs that are marked, [T, S], [B, T, S] or [B, N, T, S]."""
    return table[:, None] if table.ndim == 3 else table


WITH_OFFSET = {
    "Causal": causal,
    "LocalWindow": window,
    "BlockCausal": block_causal,
    "BlockSlidingWindow": block_window,
    "VideoMask": video,
}
OF_INDEX = {
    "KeyLimit": limit,
    "KeyPadding": lengths,
    "KeyPadding flags": flags,
    "Segments": segments,
    "Dense": dense,
}
