"""Masks accept all integer dtypes of numpy and jax, and big numbers, in every kernel."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError
from maxattn.masks.terms import sort_terms
from tests.cases import XLA_KERNELS
from tests.waiting import but

KERNELS = XLA_KERNELS | {"flash": ma.AttentionConfig(attention="flash")}
SMALL = ("int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
Q, K, V = (np.random.default_rng(i).normal(size=(2, 8, 1, 16)).astype("f") for i in range(3))


def wanted(allowed: Any) -> np.ndarray:
    """Compute attention over allowed pairs in float64; 0 for queries without keys."""
    allowed = np.broadcast_to(allowed, (2, 8, 8))
    s = np.einsum("btnh,bsnh->bts", Q, K).astype(np.float64) / 4
    p = np.where(allowed, np.exp(s), 0.0)
    total = p.sum(-1, keepdims=True)
    return np.einsum("bts,bsnh->btnh", np.where(total > 0, p / np.where(total > 0, total, 1), 0), V)


def attend(make: Any, config: ma.AttentionConfig, *arrays: Any) -> jax.Array:
    return ma.attention(*map(jnp.asarray, (Q, K, V)), mask=make(*arrays), config=config)


def check(make: Any, arrays: tuple[Any, ...], allowed: Any, kernels: Any = tuple(KERNELS)) -> None:
    """Compare kernels, with concrete and with traced arrays."""

    for name in kernels:
        run = partial(attend, make, KERNELS[name])
        known = run(*arrays)
        np.testing.assert_allclose(known, wanted(allowed), atol=2e-5, err_msg=name)
        if all(isinstance(x, jax.Array) for x in arrays):
            traced = jax.jit(run)(*arrays)
            np.testing.assert_allclose(traced, wanted(allowed), atol=2e-5, err_msg=name)


def dtype(name: str) -> Any:
    return getattr(ml_dtypes, name, None) or np.dtype(name)


MADE = ["numpy", "jax", "jax x64"]


@pytest.mark.parametrize(
    ("name", "xp"), but(product(SMALL, MADE), lambda case: case[1] == "numpy" or "64" in case[0])
)
def test_lengths_and_ids_of_every_dtype(name: str, xp: str) -> None:
    """Kernels get equal arrays for all dtypes: dense runs all of them, the others two."""
    every = (name, xp) == ("uint8", "numpy")
    kernels = list(KERNELS) if every else ["dense"]
    with jax.enable_x64(True) if "x64" in xp else nullcontext():
        lengths, ids = np.array([3, 6]), np.arange(16).reshape(2, 8) // 5
        ids = np.where(ids == 0, -1 if name.startswith("i") else 0, ids)
        make = np.array if xp == "numpy" else jnp.array
        lengths, own = (make(x.astype(dtype(name))) for x in (lengths, ids))
        keys = np.arange(8)[None, None] < np.array([3, 6])[:, None, None]
        check(M.KeyPadding, (lengths,), keys, kernels)
        same = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] >= 0)
        check(M.Segments, (own, own), same, kernels)


BEYOND = {
    "uint32": [2**31 + 5, 2**32 - 1],
    "int64": [2**40, -(2**40)],
    "uint64": [2**63 + 1, 2],
}


@pytest.mark.parametrize(
    ("name", "made"),
    [("uint32", "numpy"), ("int64", "x64"), *product(BEYOND, ["x64, used without"])],
)
def test_lengths_beyond_int32_hide_nothing_under_jit(name: str, made: str) -> None:
    """A call that can read lengths refuses those above the sequence."""
    numbers = np.array(BEYOND[name], name)
    allowed = np.arange(8)[None, None] < np.array([int(x) for x in numbers])[:, None, None]
    with jax.enable_x64(made != "numpy"):
        lengths = numbers if made == "numpy" else jnp.array(numbers)
    with jax.enable_x64(made == "x64"):
        every = made == "x64" and name == "int64"
        for kernel in KERNELS if every else ["dense"]:
            run = partial(attend, M.KeyPadding, KERNELS[kernel])
            with pytest.raises(InputError, match="from 0 to the 8 keys"):
                run(lengths)
            if made != "numpy":
                np.testing.assert_allclose(jax.jit(run)(lengths), wanted(allowed), atol=2e-5)


def test_the_least_length_counts_as_none_on_every_shard() -> None:
    mask = M.KeyPadding(jnp.array([-(2**31), 11]))
    for shard, real in ((0, [0, 8]), (8, [0, 3])):
        np.testing.assert_array_equal(sort_terms(mask).lengths(2, 8, shard), real)


IDS = {
    "uint32": [2**31 + 1, 2**31 + 2, 1, 0, 2**32 - 1, 2**32 - 1, 1, 2**31 + 1],
    "int64": [2**32, 0, 2**32, -(2**32), -1, 2**33, 0, 2**62],
    "uint64": [2**63, 2**63 + 1, 0, 1, 2**32, 2**64 - 1, 2**63, 0],
}


@pytest.mark.parametrize("x64", [True, False], ids=["x64", "used without"])
@pytest.mark.parametrize("name", IDS)
def test_ids_beyond_int32_stay_apart(name: str, x64: bool) -> None:
    q = np.array([IDS[name], IDS[name][::-1]], name)
    kv = np.array([IDS[name]], name)
    allowed = (q[:, :, None] == kv[:, None]) & (q[:, :, None] >= 0)
    with jax.enable_x64(True):
        pair = jnp.array(q), jnp.array(kv)
    with jax.enable_x64(x64):
        check(M.Segments, pair, allowed, KERNELS if x64 and name == "int64" else ["dense"])
    with pytest.raises(InputError, match="number them from 0"):
        M.Segments(q, kv)


def test_ids_of_two_dtypes() -> None:
    q = jnp.array([[2**31 + 5, 5, 2**31, 0, 1, 2, 3, 4]], jnp.uint32)
    kv = np.array([[5, -1, 0, 1, -(2**31), 2**31 - 1, 3, -5]], np.int64)
    allowed = (np.asarray(q).astype(np.int64)[:, :, None] == kv[:, None]) & (kv[:, None] >= 0)
    for ids in (kv, jnp.array(kv)):
        check(M.Segments, (q, ids), allowed, ["dense"])


def test_another_byte_order_and_spans_of_time() -> None:
    for dtype in (">i4", ">i8"):
        lengths = np.array([3, 6], dtype)
        check(M.KeyPadding, (lengths,), np.arange(8) < [[[3]], [[6]]], ["dense"])
    with pytest.raises(InputError, match="integer lengths"):
        M.KeyPadding(np.array([3, 6], "timedelta64[s]"))


@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.parametrize("window, size", [(2**29, 2**29), (1, 2**29), (2**11, 1)])
def test_a_budget_past_int32_is_all_frames(frames: int, window: int, size: int) -> None:
    mask = M.VideoMask(frames, 8 // frames, size, window=window, sink=0)
    same = M.VideoMask(frames, 8 // frames, size)
    rows = np.arange(8)
    got, want = (m.bind(8, 8).allowed(rows, rows) for m in (mask, same))
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)
    check(lambda: mask, (), want[0, 0], KERNELS if (frames, size) == (4, 2**29) else ["dense"])


def test_a_video_longer_than_positions_is_refused() -> None:
    with pytest.raises(InputError, match="at most 1073741824"):
        M.VideoMask(2**20, 2**20)
