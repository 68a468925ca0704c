"""Block maps and counts: exact against the definition, bounds with data, few steps on a video."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxattn import masks as M
from tests.fuzz.masks import Tree
from tests.masks.definitions import build, calls, cases, table
from tests.tries import tries


def _blocks_of(pairs: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    def kind(i: int, j: int) -> int:
        block = pairs[i : i + block_q, j : j + block_kv]
        return M.FULL if block.all() else M.MIXED if block.any() else M.EMPTY

    rows, columns = (range(0, n, b) for n, b in zip(pairs.shape, (block_q, block_kv), strict=True))
    return np.array([[kind(i, j) for j in columns] for i in rows])


@tries(60)
@given(cases(), st.integers(1, 45), st.integers(1, 45))
def test_exact_for_positions(case: tuple[Tree, int, int], block_q: int, block_kv: int) -> None:
    tree, q_len, kv_len = case
    mask, pairs = build(tree), table(tree, q_len, kv_len)
    got = mask.block_map(block_q, block_kv, q_len, kv_len)
    assert got.dtype == np.int8
    np.testing.assert_array_equal(got, _blocks_of(pairs, block_q, block_kv))
    assert mask.allowed_pairs(q_len, kv_len) == pairs.sum()


def _data(kind: str, q_len: int, kv_len: int, seed: int) -> M.Mask:
    rng = np.random.default_rng(seed)
    return {
        "lengths": M.KeyPadding(rng.integers(0, kv_len + 1, 2)),
        "flags": M.KeyPadding(rng.random((2, kv_len)) < 0.8),
        "segments": M.Segments(rng.integers(-1, 2, (2, q_len)), rng.integers(-1, 2, (2, kv_len))),
        "dense": M.Dense(rng.random((2, 3, q_len, kv_len)) < 0.9),
    }[kind]


@tries(30)
@given(
    cases(20),
    st.sampled_from(["lengths", "flags", "segments", "dense"]),
    st.sampled_from(["and", "or", "and not", "or not"]),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_conservative_with_data(
    case: tuple[Tree, int, int], kind: str, join: str, block: int, seed: int
) -> None:
    """The true kind is within the bounds for all arrays; a form has the same bounds."""
    tree, q_len, kv_len = case
    data = _data(kind, q_len, kv_len, seed)
    data = ~data if "not" in join else data
    mask = (build(tree) & data if "and" in join else build(tree) | data).bind(q_len, kv_len)
    truth = np.broadcast_to(
        mask.allowed(np.arange(q_len), np.arange(kv_len)), (2, 3, q_len, kv_len)
    )
    assert not (truth & ~_inside(mask.intervals(np.arange(q_len)), kv_len)).any()
    assert not (_inside(mask.intervals(np.arange(q_len), data=False), kv_len) & ~truth).any()
    assert mask.allowed_pairs(q_len, kv_len) >= truth.sum(axis=(2, 3)).max()
    got = mask.block_map(block, block, q_len, kv_len)
    for b in range(2):
        true = _blocks_of(truth[b, 0], block, block)
        assert ((got == M.MIXED) | (got == true)).all()
    np.testing.assert_array_equal(mask.form().block_map(block, block, q_len, kv_len), got)


def _inside(intervals: tuple, kv_len: int) -> np.ndarray:
    keys = np.arange(kv_len)
    parts = [(keys >= lo[:, None]) & (keys < hi[:, None]) for lo, hi in intervals]
    return np.any(parts, axis=0) if parts else np.zeros(1, bool)


def test_positions_still_decide_beside_data() -> None:
    mask = M.Causal() & M.KeyPadding([3])
    assert mask.block_map(2, 2, 4, 4).tolist() == [[M.MIXED, M.EMPTY], [M.MIXED, M.MIXED]]
    mask = M.Causal() | M.KeyPadding([3])
    assert mask.block_map(2, 2, 4, 4).tolist() == [[M.MIXED, M.MIXED], [M.FULL, M.MIXED]]


LONG = {
    "window of blocks that no block divides": M.BlockSlidingWindow(3599, 5),
    "a combination": M.VideoMask(21, 3600, 3, 2, 1) & ~M.LocalWindow(5, 5)
    | M.KeyPadding([3])
    | M.KeyLimit(9),
}


@pytest.mark.parametrize("block", [1560, 3600])
@pytest.mark.parametrize("name", LONG)
def test_few_steps_and_little_memory_at_75600_tokens(name: str, block: int) -> None:
    assert calls(lambda: LONG[name].block_map(block, block, 75_600, 75_600)) < 75_600
    tracemalloc.start()
    got = LONG[name].block_map(block, block, 75_600, 75_600)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got.shape == (-(-75_600 // block),) * 2
    assert peak < 64 * 2**20, "a table of all pairs would be 5.7e9 bytes"


def test_counts_at_32760_tokens() -> None:
    """21 frames of 1560 tokens, each of which sees its own and up to six before."""
    mask = M.BlockSlidingWindow(1560, 7)
    full = sum(min(i + 1, 7) for i in range(21))
    assert mask.block_tally(1560, 1560, 32_760, 32_760) == (21**2 - full, full, 0)
    assert mask.allowed_pairs(32_760, 32_760) == full * 1560**2
