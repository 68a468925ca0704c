"""Every mask against pictures drawn by hand, and against its definition pair by pair."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import maxattn as ma
from maxattn import masks as M
from tests.fuzz.masks import Tree
from tests.masks.definitions import build, cases, table, trees
from tests.tries import tries

# Those in the docstrings of masks are run by test_docstrings.py.
PICTURES = {
    "causal, offset 1": (M.Causal(offset=1), "11. 111 111 111"),
    "causal, queries before the keys": (M.Causal(offset=-2), "... ... 1.. 11."),
    "window open to the left": (M.LocalWindow(None, 1), "11.. 111. 1111 1111"),
    "own block of three, ragged": (M.BlockSlidingWindow(3, 1), "111.. 111.. 111.. ...11 ...11"),
    "video, window of two blocks and a sink": (
        M.VideoMask(7, 1, frames_per_block=2, window=2, sink=1),
        "11..... 11..... 1111... 1111... 1..111. 1..111. 1...111",
    ),
    "video, first frame alone, window of one": (
        M.VideoMask(5, 1, frames_per_block=2, window=1, first_frame_alone=True),
        "1.... .11.. .11.. ...11 ...11",
    ),
    "video, the last block as a chunk": (M.VideoMask(4, 2, window=2, sink=1), "11....11 11....11"),
    "dense with one row": (M.Dense([[True, False]]), "1. 1."),
    "causal without the diagonal": (M.Causal() & ~M.LocalWindow(0, 0), "... 1.. 11."),
}


ENDS = {
    "blocks": M.BlockCausal(2**29, offset=2**29),
    "to the right": M.LocalWindow(None, 2**29, offset=2**29),
    "both": M.LocalWindow(2**29, 2**29, offset=0),
    "causal": M.Causal(offset=2**29),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_largest_numbers_stay_in_int32(name: str) -> None:
    q = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    chunks = {"query_chunk_size": 2, "key_chunk_size": 2}
    assert ENDS[name].allowed(np.arange(5), np.arange(5)).all()
    for more in ({}, {"use_memory_efficient_attention": True, **chunks}):
        config = ma.AttentionConfig(attention="dot_product", **more)
        got = ma.attention(q, q, q, mask=ENDS[name], config=config)
        np.testing.assert_allclose(got, ma.attention(q, q, q), atol=1e-5)


@pytest.mark.parametrize("name", PICTURES)
def test_picture(name: str) -> None:
    mask, picture = PICTURES[name]
    want = np.array([[c == "1" for c in row] for row in picture.split()])
    got = mask.bind(*want.shape).allowed(np.arange(want.shape[0]), np.arange(want.shape[1]))
    assert isinstance(got, np.ndarray) and got.dtype == bool and got.ndim == 4
    np.testing.assert_array_equal(np.broadcast_to(got, (1, 1, *want.shape))[0, 0], want)


@tries(80)
@given(cases())
def test_allowed_and_intervals_are_the_definition(case: tuple[Tree, int, int]) -> None:
    tree, q_len, kv_len = case
    mask, want = build(tree).bind(q_len, kv_len), table(tree, q_len, kv_len)
    for q, k in ((0, 0), (q_len // 2, kv_len // 3)):  # all pairs, and a part of them
        got = mask.allowed(np.arange(q_len - q), np.arange(kv_len - k), q, k)[0, 0]
        part = want[q:, k:]
        np.testing.assert_array_equal(np.broadcast_to(got, part.shape), part)
    got = np.zeros((q_len, kv_len), dtype=bool)
    for lo, hi in mask.intervals(np.arange(q_len)):
        assert lo.dtype == hi.dtype == np.int32 and lo.shape == hi.shape == (q_len,)
        assert lo.min() >= 0 and hi.min() >= 0 and max(lo.max(), hi.max()) <= M.BIG
        got |= (np.arange(kv_len) >= lo[:, None]) & (np.arange(kv_len) < hi[:, None])
    np.testing.assert_array_equal(got, want)


@tries(25)
@given(trees(7, 10))  # one pair of lengths, so that jax compiles its operations once
def test_jax_agrees_with_numpy(tree: Tree) -> None:
    q_len, kv_len = 7, 10
    mask = build(tree).bind(q_len, kv_len)
    got, want = mask.allowed(jnp.arange(q_len), jnp.arange(kv_len)), table(tree, q_len, kv_len)
    assert not isinstance(got, np.ndarray)
    np.testing.assert_array_equal(np.broadcast_to(np.asarray(got)[0, 0], want.shape), want)
    ours = mask.intervals(jnp.arange(q_len), jnp)
    for mine, theirs in zip(ours, mask.intervals(np.arange(q_len)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_data_masks_keep_batch_rows_and_heads_apart() -> None:
    flags = np.array([[1, 0, 1], [0, 1, 1]], dtype=bool)
    heads = np.arange(2 * 3 * 2 * 3).reshape(2, 3, 2, 3) % 2 == 0
    q, kv = np.arange(2), np.arange(3)
    np.testing.assert_array_equal(M.KeyPadding(flags).allowed(q, kv), flags[:, None, None, :])
    lengths = M.KeyPadding(np.array([1, 3])).allowed(q, kv)[:, 0, 0]
    assert lengths.tolist() == [[1, 0, 0], [1, 1, 1]]
    np.testing.assert_array_equal(M.Dense(heads).bind(2, 3, 2, 3).allowed(q, kv), heads)
    np.testing.assert_array_equal(M.Dense(heads[:, 0]).bind(2, 3).allowed(q, kv), heads[:, :1])
    both = M.Dense(heads) & M.KeyPadding(flags)
    np.testing.assert_array_equal(both.bind(2, 3).allowed(q, kv), heads & flags[:, None, None, :])


def test_leaves_are_indexed_and_lengths_are_positions() -> None:
    """On a shard of the keys, flags and ids are local; lengths count in the whole sequence."""
    q, kv = np.arange(2), np.arange(3)
    flags = np.array([[True, False, True]])
    np.testing.assert_array_equal(M.KeyPadding(flags).allowed(q, kv, 0, 100)[0, 0, 0], flags[0])
    assert M.KeyPadding([101]).allowed(q, kv, 0, 100)[0, 0, 0].tolist() == [True, False, False]
    ids = M.Segments([[5, 6]], [[6, 6, 5]])
    np.testing.assert_array_equal(ids.allowed(q, kv, 40, 80), ids.allowed(q, kv))
