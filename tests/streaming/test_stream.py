"""A stream's masks and slots, and its order of clean and noisy clips."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.streaming import CacheLayout
from tests.pairwise import name_of, pairwise, product

AXES = {"window": (None, 2, 4), "sink": (0, 1, 3), "size": (1, 3, 5), "alone": (False, True)}


def fits(case: dict) -> bool:
    """Check whether the sink is inside a window, and leaves room for a block."""
    if case["window"] is None:
        return case["sink"] == 0
    return case["sink"] <= (case["window"] - 1) * case["size"]


def stream_of(case: dict) -> ma.Stream:
    return ma.Stream(2, case["size"], case["window"], case["sink"], case["alone"])


def frames_of(stream: ma.Stream) -> int:
    """Return three times as many frames as the cache has slots, or seven blocks."""
    wanted = 3 * (stream.budget or 0) or 7 * stream.frames_per_block
    return next(n for n in range(wanted, 2 * wanted + 9) if stream.ends_block(n))


CASES, PAIRS = product(AXES, fits), pairwise(AXES, fits)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_slots_hold_what_the_masks_allow(case: dict) -> None:
    """After each block, its frames and all that its mask allows are in the slots."""
    stream = stream_of(case)
    frames, held = frames_of(stream), {}
    at = np.arange(2 * frames)
    one = ma.Stream(1, case["size"], case["window"], case["sink"], case["alone"])
    causal = one.mask(frames).bind(frames, frames).allowed(at[:frames], at[:frames])[0, 0]
    teacher = one.teacher_mask(frames).bind(2 * frames, 2 * frames).allowed(at, at)[0, 0]
    for start, stop in stream.blocks(frames):
        held |= {stream.slots(frame): frame for frame in range(start, stop)}
        kept, own = set(held.values()), set(range(start, stop))
        for frame in range(start, stop):
            assert set(np.flatnonzero(causal[frame])) == kept
            assert set(np.flatnonzero(teacher[frame])) == kept
            noisy = set(np.flatnonzero(teacher[frames + frame]))
            assert noisy == (kept - own) | {frames + i for i in own}


@pytest.mark.parametrize("case", PAIRS, ids=name_of)
def test_slots_of_numbers_of_arrays_and_under_jit_are_the_same(case: dict) -> None:
    stream, frames = stream_of(case), np.arange(40)
    want = [stream.slots(int(i)) for i in frames]
    np.testing.assert_array_equal(stream.slots(frames), want)
    np.testing.assert_array_equal(jax.jit(stream.slots)(jnp.asarray(frames)), want)


@pytest.mark.parametrize("case", [c for c in PAIRS if c["window"]], ids=name_of)
def test_places_count_frames_of_the_window_in_their_order(case: dict) -> None:
    stream = stream_of(case)
    budget = stream.budget or 0
    places_of = jax.jit(CacheLayout(stream, budget, "slots_with_sink").places)
    held: dict[int, int] = {}
    for _, stop in stream.blocks(frames_of(stream)):
        held |= {stream.slots(i): i for i in range(max(0, stop - budget), stop) if i >= stream.sink}
        held |= {i: i for i in range(min(stream.sink, stop))}
        order = sorted(held.values())
        places = places_of(jnp.asarray(stop))
        assert [int(places[slot]) for slot in held] == [order.index(i) for i in held.values()]


def test_a_video_may_be_its_first_block() -> None:
    for alone in (False, True):
        stream = ma.Stream(2, 3, first_frame_alone=alone)
        size = stream.first_block
        assert stream.blocks(size) == ((0, size),)
        assert not stream.ends_block(0) and not stream.ends_block(size + 1)


def test_masks_are_those_of_its_numbers() -> None:
    stream = ma.Stream(1560, 3, 4, 3, True)
    assert stream.mask(22) == ma.masks.VideoMask(22, 1560, 3, 4, 3, True)
    assert stream.teacher_mask(22) == ma.masks.TeacherForcing(22, 1560, 3, 4, 3, True)
    assert hash(stream) == hash(ma.Stream(1560, 3, 4, 3, True)) and stream.budget == 12


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_pairs_come_apart_again(shards: int) -> None:
    stream = ma.Stream(3)
    clean, noisy = jnp.arange(48).reshape(2, 24), 100 + jnp.arange(48).reshape(2, 24)
    both = stream.pair(clean, noisy, shards)
    for got, want in zip(stream.unpair(both, shards), (clean, noisy), strict=True):
        np.testing.assert_array_equal(got, want)
    share = 24 // shards  # of the clean tokens, with which each device begins
    np.testing.assert_array_equal(both[:, :share], clean[:, :share])
    np.testing.assert_array_equal(both[:, share : 2 * share], noisy[:, :share])


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_integers_of_numpy_are_numbers(kind: type) -> None:
    """Numbers of frames, layers or tokens may be numpy's; they are stored as int."""
    stream = ma.Stream(kind(2), kind(3), kind(2), kind(1))
    assert stream == ma.Stream(2, 3, 2, 1)
    assert stream.blocks(kind(6)) == stream.blocks(6)
    assert stream.mask(kind(6)) == stream.mask(6)
    assert [stream.slots(kind(i)) for i in range(9)] == [stream.slots(i) for i in range(9)]
    sizes = {"layers": kind(1), "batch": kind(1), "kv_heads": kind(2), "dim_head": kind(8)}
    cache, endless = stream.cache(**sizes), ma.Stream(2).cache(**sizes, frames=kind(4))
    assert (cache.k.shape, endless.layout.frames) == ((1, 1, 12, 2, 8), 4)
    assert type(cache.prefix(kind(6)).own) is type(endless.layout.frames) is int
    assert type(cache.extract(kind(1)).start) is int


def test_a_cache_that_jax_maps_over_can_be_printed() -> None:
    """Its leaves may be shardings, axes or None instead of arrays."""
    cache = ma.Stream(2, 1, 3).cache(layers=1, batch=1, kv_heads=1, dim_head=8)
    assert "KVCache(bfloat16[1,1,6,1,8], frame unknown" in repr(jax.eval_shape(lambda: cache))
    for leaf in (0, None, cache.k.sharding, "axis"):
        assert "frame unknown, 3 slots, empty" in repr(jax.tree.map(lambda x, y=leaf: y, cache))
