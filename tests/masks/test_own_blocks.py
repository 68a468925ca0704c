"""Masks of equal blocks that attend only to themselves: one block's mask, repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from maxattn import masks as M
from maxattn.masks.terms import own_blocks


@M.mask_type
class TwoBlocks(M.BlockSlidingWindow):
    """Allow the query's own block and the one before, for any window."""

    def seen(self, pos: Any, xp: Any) -> Any:
        end = (pos // self.block + 1) * self.block
        return ((end - 2 * self.block, end),)


@M.mask_type
class Early(M.Causal):
    """Be causal for the first queries only."""

    def seen(self, pos: Any, xp: Any) -> Any:
        return ((None, xp.where(pos < 30, pos + 1, 0)),)


SEGMENTS, CAUSAL = M.Segments.of_lengths((8,) * 6), M.Causal(0)
IDS = np.zeros((2, 48), np.int32)
# (mask, keys) of 48 queries -> blocks, and what is allowed inside of one
FOUND: dict[str, tuple[M.Mask, int, int, str]] = {
    "segments": (SEGMENTS, 48, 6, "Full()"),
    "two segments": (M.Segments.of_lengths((24, 24)), 48, 2, "Full()"),
    "segments of other keys": (M.Segments.of_lengths((8,) * 6, (3,) * 6), 18, 6, "Full()"),
    "frames": (M.VideoMask(12, 4, frames_per_block=2, window=1), 48, 6, "Full()"),
    "causal": (SEGMENTS & CAUSAL, 48, 6, "Causal(offset=0)"),
    "all but oneself and before": (SEGMENTS & ~CAUSAL, 48, 6, "~Causal(offset=0)"),
    "shifted": (SEGMENTS & M.Causal(3), 48, 6, "Causal(offset=3)"),
    "blocks inside": (
        M.BlockSlidingWindow(24, 1) & M.BlockCausal(8), 48, 2, "BlockCausal(8, offset=0)",
    ),
    "blocks of blocks": (SEGMENTS & M.BlockSlidingWindow(4, 1), 48, 12, "Full()"),
    "either": (
        SEGMENTS & (M.LocalWindow(1, 0) | M.LocalWindow(0, 3)), 48, 6,
        "LocalWindow(0, 3, offset=0) | LocalWindow(1, 0, offset=0)",
    ),
}  # fmt: skip
NONE: dict[str, tuple[M.Mask, int]] = {
    "causal": (CAUSAL, 48),
    "a shorter last block": (M.BlockSlidingWindow(20, 1), 48),
    "segments of two lengths": (M.Segments.of_lengths((8, 16, 8, 16)), 48),
    "equal queries, other keys": (M.Segments.of_lengths((24, 24), (8, 16)), 24),
    "two blocks seen": (M.BlockSlidingWindow(8, 2), 48),
    "shifted blocks": (M.BlockSlidingWindow(8, 1, offset=4), 48),
    "fewer queries than keys": (M.BlockSlidingWindow(8, 1), 64),
    "a first frame alone": (
        M.VideoMask(12, 4, frames_per_block=2, window=1, first_frame_alone=True), 48,
    ),
    "shifted frames": (M.VideoMask(12, 4, frames_per_block=2, window=1, offset=4), 48),
    "blocks that others cut": (SEGMENTS & M.BlockCausal(12), 48),
    "keys that end": (SEGMENTS & M.KeyLimit(40), 48),
    "padding": (SEGMENTS & M.KeyPadding(np.array([40, 48])), 48),
    "ids": (M.Segments(IDS, IDS), 48),
    "causal where keys are others": (M.Segments.of_lengths((8,) * 6, (4,) * 6) & CAUSAL, 24),
    "either of two": (M.BlockSlidingWindow(8, 1) | M.BlockSlidingWindow(16, 1), 48),
    "no keys": (M.Segments.of_lengths((24, 24), (0, 0)), 0),
    "a kind derived from blocks": (TwoBlocks(8, 1), 48),
    "a kind derived from what repeats": (SEGMENTS & Early(), 48),
}  # fmt: skip


def table(mask: M.Mask, q_len: int, kv_len: int) -> np.ndarray:
    allowed = mask.allowed(np.arange(q_len), np.arange(kv_len))
    return np.broadcast_to(np.asarray(allowed), (1, 1, q_len, kv_len))[0, 0]


@pytest.mark.parametrize("name", list(FOUND))
def test_blocks_are_all_that_a_mask_says(name: str) -> None:
    mask, keys, count, said = FOUND[name]
    bound = mask.bind(48, keys)
    found = own_blocks(bound, 48, keys)
    assert found is not None and (found.count, str(found.mask)) == (count, said)
    inside = table(found.mask, found.q_len, found.kv_len)
    repeated = np.kron(np.eye(count, dtype=bool), inside)
    np.testing.assert_array_equal(repeated, table(bound, 48, keys))


@pytest.mark.parametrize("name", list(NONE))
def test_no_blocks(name: str) -> None:
    mask, keys = NONE[name]
    assert own_blocks(mask.bind(48, keys).form(), 48, keys) is None


@pytest.mark.parametrize("kind", [TwoBlocks(8, 1, 0), Early(0)], ids=str)
def test_a_derived_kind_has_no_answers_of_the_other(kind: M.Mask) -> None:
    """A subclass that overrides the pairs does not inherit band, jumps and most keys."""
    found = kind.band(), kind.most_keys(), kind.row_blocks(), kind.own_block(), kind.own_period()
    assert found == (None,) * 5 and not kind.repeats(8, 8)
    assert kind.simplified() is kind
