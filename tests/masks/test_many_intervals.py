"""Masks with many parts: intervals and comparisons grow additively, and their number is bounded."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from collections.abc import Iterable
from functools import reduce
from operator import and_, or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError, Unsupported
from maxattn.kernels.fa4.kernel import HopperFa4
from maxattn.kernels.splash.mask_codes import KernelInts, KernelNumpy, unwrap
from maxattn.masks.algebra import has_few_spans
from maxattn.masks.spans import MOST_SPANS
from tests.waiting import but

T, S = 24, 40
ZERO = np.zeros(1, np.int32)


def spans(mask: M.Mask) -> int:
    return len(mask.spans(ZERO, np, True))


def hidden(ranges: int, step: int = 3) -> M.Mask:
    starts = range(0, ranges * step, step)
    return reduce(and_, (~(M.KeyLimit(i + 2) & ~M.KeyLimit(i + 1)) for i in starts))


def windows(numbers: Iterable[int], right: int = 0) -> M.Mask:
    return reduce(or_, (M.LocalWindow(0, right, i) for i in numbers))


def drawn(seed: int) -> M.Mask:
    """Join unions of shifted windows, so that ends of all kinds are sorted."""
    rng = np.random.default_rng(seed)

    def some() -> M.Mask:
        offsets, sides = rng.integers(-30, 30, 4), rng.integers(0, 5, (4, 2))
        every = zip(offsets, sides, strict=True)
        found = reduce(or_, (M.LocalWindow(*map(int, two), int(at)) for at, two in every))
        found = found | M.VideoMask(20, 2, 2, window=3, sink=int(rng.integers(0, 3)), offset=4)
        found = found & hidden(3, 5) if rng.random() < 0.4 else found
        return ~found if rng.random() < 0.5 else found

    joins = (and_, or_)
    return joins[seed % 2](joins[rng.integers(2)](some(), some()), some()).bind(T, S)


def said(ends: Any) -> np.ndarray:
    """Convert intervals to a table of pairs."""
    keys, table = np.arange(S), np.zeros((T, S), bool)
    for lo, hi in ends:
        lo, hi = (0 if lo is None else lo), (M.BIG if hi is None else hi)
        lo, hi = (np.broadcast_to(np.asarray(end), (T,))[:, None] for end in (lo, hi))
        table |= (keys >= lo) & (keys < hi)
    return table


@pytest.mark.parametrize("seed", but(range(24), range(5)))
def test_sorted_intervals_are_the_mask(seed: int) -> None:
    mask = drawn(seed)
    want = np.broadcast_to(mask.allowed(np.arange(T), np.arange(S))[0, 0], (T, S))
    q = np.arange(T, dtype=np.int32)
    np.testing.assert_array_equal(said(mask.spans(q, np, True)), want)
    np.testing.assert_array_equal(said(mask.spans(jnp.asarray(q), jnp, True)), want)
    in_kernel = mask.spans(KernelInts(jnp.asarray(q)), KernelNumpy, True)
    np.testing.assert_array_equal(said(map(unwrap, x) for x in in_kernel), want)
    assert len(in_kernel) == spans(mask) <= 2 * mask.extent.masks
    truth, blocks = want.reshape(6, 4, 8, 5), mask.block_map(4, 5, T, S)
    wanted = np.where(truth.all((1, 3)), M.FULL, np.where(truth.any((1, 3)), M.MIXED, M.EMPTY))
    if mask.has_exact_intervals:
        np.testing.assert_array_equal(blocks, wanted)
    assert ((blocks == wanted) | (blocks == M.MIXED)).all()


@pytest.mark.parametrize("ranges", [1, 2, 7, 18, 200])
def test_hidden_ranges_are_one_interval_more_each(ranges: int) -> None:
    mask = hidden(ranges)
    assert spans(mask) == ranges + 1
    want = [k % 3 != 1 for k in range(3 * ranges)]
    assert mask.allowed(ZERO, np.arange(3 * ranges))[0, 0, 0].tolist() == want


def test_numbers_are_merged_and_what_is_empty_goes() -> None:
    assert spans(M.Or((M.KeyLimit(4), M.KeyLimit(9), ~M.KeyLimit(20), M.KeyLimit(0)))) == 2
    assert spans(M.Or((M.KeyLimit(4), ~M.KeyLimit(4)))) == 1
    assert spans(M.And((M.KeyLimit(4), ~M.KeyLimit(4)))) == 0
    assert spans(M.Not(M.KeyLimit(0))) == 1 and spans(M.Not(M.And((M.Full(), M.Empty())))) == 1
    assert spans(M.Not(windows(range(1, 12)))) == 12 <= spans(~windows(range(1, 12))) <= 16


BEYOND = {
    "hidden keys": hidden(60, 2),
    "windows": windows(range(1, 60, 3)) & windows(range(1, 80, 4), 1) & M.Causal(60),
    "no windows": ~windows(range(1, 80, 2)),
}


@pytest.mark.parametrize("name", BEYOND)
def test_beyond_the_limit_bounds_are_few_and_true(name: str) -> None:
    mask = BEYOND[name].bind(64, 128)
    assert not mask.has_exact_intervals and not has_few_spans(mask)
    rows, keys = np.arange(64), np.arange(128)
    truth = np.broadcast_to(mask.allowed(rows, keys)[0, 0], (64, 128))
    upper, lower = mask.intervals(rows), mask.intervals(rows, data=False)
    assert len(upper) <= MOST_SPANS and not lower
    inside = sum((keys >= lo[:, None]) & (keys < hi[:, None]) for lo, hi in upper) > 0
    assert not (truth & ~inside).any()
    assert mask.allowed_pairs(64, 128) >= truth.sum()
    assert "█" in mask.show(64, 128) or "▒" in mask.show(64, 128)


def test_beyond_the_limit_blockwise_is_right() -> None:
    mask = BEYOND["windows"]
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 128, 1, 8)) for i in range(3))
    dense = ma.AttentionConfig(attention="dot_product")
    chunks = {"query_chunk_size": 16, "key_chunk_size": 16}
    blockwise = dense.replace(use_memory_efficient_attention=True, **chunks)
    allowed = M.Dense(mask.bind(128, 128).allowed(np.arange(128), np.arange(128)))
    out = ma.attention(q, k, v, mask=mask, config=blockwise)
    want = ma.attention(q, k, v, mask=allowed, config=dense)
    np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("name", BEYOND)
def test_beyond_the_limit_flash_is_refused(name: str) -> None:
    call = ma.Call(1, 128, 128, 1, 1, 64, "bfloat16", BEYOND[name].bind(128, 128))
    with pytest.raises(Unsupported, match="up to 32 intervals of keys per query"):
        ma.plan(call, ma.AttentionConfig(attention="flash"), target=ma.Target.named("TPU v5p"))
    hopper = ma.Target.named("NVIDIA H100", packages=(("fa4-jax", "0.1.0"),))
    reason = HopperFa4.supports(call, hopper)
    assert reason is not None and "intervals of keys" in reason.rule
    assert ma.plan(call, target=hopper).kernel.name in ("dot_product", "memory_efficient")


# ---- the canonical form --------------------------------------------------------------------------


def test_nested_alternations_stay_as_large_as_they_are_written() -> None:
    mask: M.Mask = M.Causal(0)
    for i in range(50):
        mask = ~((mask | M.LocalWindow(i, 3, 0)) & ~M.KeyLimit(i + 1))
    assert mask.extent.masks <= 5 * 50
    want = np.tril(np.ones((60, 60), bool))
    rows, keys = np.mgrid[:60, :60]
    for i in range(50):
        near = (rows - keys <= i) & (keys - rows <= 3)
        want = ~((want | near) & ~(keys < i + 1))
    np.testing.assert_array_equal(mask.allowed(np.arange(60), np.arange(60))[0, 0], want)


def test_a_mask_that_doubles_is_refused() -> None:
    mask: M.Mask = M.Causal(0)
    with pytest.raises(InputError, match="at most 1024 masks"):
        for i in range(40):
            a, b = M.LocalWindow(i, 3, 0), M.KeyLimit(i + 9)
            mask = (mask & a | ~b) & (mask & b | a)
    with pytest.raises(InputError, match="128 levels"):
        for i in range(200):
            mask = (mask | M.LocalWindow(i, 3, 0)) & ~M.KeyLimit(i + 1)


def test_a_copy_does_not_keep_the_identity_of_arrays() -> None:
    mask = (M.KeyPadding(np.array([2, 5])) & M.Causal(0)) | M.KeyLimit(1)
    assert mask.identity and mask.is_normal
    for twin in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert not twin.is_normal and twin.identity != mask.identity
        assert twin & mask != mask and mask & mask == mask


def test_deep_masks_are_copied_wherever_the_stack_is() -> None:
    """126 levels, with 300 frames of Python's stack left; the copy has its own arrays."""
    mask: M.Mask = M.KeyPadding(np.array([4]))
    for i in range(62):
        mask = (mask | M.LocalWindow(i, 3, 0)) & ~M.KeyLimit(i + 1)
    assert mask.extent.levels > 120
    frames = len(inspect.stack())
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(frames + 300)
    try:
        twin = copy.deepcopy(mask)
    finally:
        sys.setrecursionlimit(before)
    assert str(twin) == str(mask) and twin.form() == mask.form()
    (mine,), (theirs,) = jax.tree.leaves(mask), jax.tree.leaves(twin)
    assert mine is not theirs and (mine == theirs).all()
