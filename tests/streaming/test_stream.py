"""One value says it all: its masks, its slots, and how clean and noisy clips are ordered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.streaming import CacheLayout
from tests.pairwise import product
from tests.streaming.test_equivalence import AXES, fits, frames_of, name, stream_of

CASES = product(AXES, fits)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_slots_hold_what_the_masks_allow(case: dict) -> None:
    """After each block its frames and those that its mask lets it see are in the slots."""
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


@pytest.mark.parametrize("case", CASES, ids=name)
def test_slots_of_numbers_of_arrays_and_under_jit_are_the_same(case: dict) -> None:
    stream, frames = stream_of(case), np.arange(40)
    want = [stream.slots(int(i)) for i in frames]
    np.testing.assert_array_equal(stream.slots(frames), want)
    np.testing.assert_array_equal(jax.jit(stream.slots)(jnp.asarray(frames)), want)


@pytest.mark.parametrize("case", [c for c in CASES if c["window"]], ids=name)
def test_places_count_frames_of_the_window_in_their_order(case: dict) -> None:
    stream = stream_of(case)
    budget = stream.budget or 0
    layout = CacheLayout(stream, budget, "slots_with_sink")
    held: dict[int, int] = {}
    for _, stop in stream.blocks(frames_of(stream)):
        held |= {stream.slots(i): i for i in range(max(0, stop - budget), stop) if i >= stream.sink}
        held |= {i: i for i in range(min(stream.sink, stop))}
        order = sorted(held.values())
        places = layout.places(jnp.asarray(stop))
        assert [int(places[slot]) for slot in held] == [order.index(i) for i in held.values()]


def test_masks_are_those_of_its_numbers() -> None:
    stream = ma.Stream(1560, 3, 4, 3, True)
    assert stream.mask(21) == ma.masks.VideoMask(21, 1560, 3, 4, 3, True)
    assert stream.teacher_mask(21) == ma.masks.TeacherForcing(21, 1560, 3, 4, 3, True)
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
