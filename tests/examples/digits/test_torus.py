"""Digits on a torus, and what judges drawn videos: true ones score full, false ones fail."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from maxattn_examples.digits import drift, torus
from maxattn_examples.digits.evaluate import Judge, scores
from maxattn_examples.digits.settings import DataSettings
from maxattn_examples.digits.videos import DigitVideos, load
from maxattn_examples.digits.words import STEPS, all_prompts

DATA = DataSettings(frames=24, torus=True)
WHOLE = DataSettings()
SCAN = load("test")[0][0]


@cache
def judge(data: DataSettings) -> Judge:
    """Fit a classifier once."""
    return Judge(data)


@cache
def true_videos() -> tuple[np.ndarray, tuple[str, ...]]:
    """Draw scans that the judge was not fitted on: two of each digit in every direction."""
    scans, labels = load("test")
    videos, prompts = [], []
    for number, (prompt, (digit, direction)) in enumerate(all_prompts().items()):
        for scan in scans[labels == digit][:2]:
            place = number % 5, 5 * number % 12
            videos.append(torus.rolled(scan, direction, *place, DATA))
            prompts.append(prompt)
    return np.stack(videos).astype(np.float64), tuple(prompts)


def measured(videos: np.ndarray) -> drift.Drift:
    return drift.measure(judge(DATA), videos, true_videos()[1], 3)


@pytest.mark.parametrize("direction", STEPS)
def test_a_digit_is_back_where_it_was_after_a_turn(direction: str):
    video = torus.rolled(SCAN, direction, 9, 2, DATA)
    np.testing.assert_array_equal(video[:12], video[12:])
    moved = np.roll(video[:-1], STEPS[direction], (1, 2))
    np.testing.assert_array_equal(moved, video[1:])
    assert (video.sum((1, 2)) == SCAN.sum()).all()
    lane, start = 9, 2
    corner = (start, lane) if STEPS[direction][0] else (lane, start)
    back = np.roll(video[0], (-corner[0], -corner[1]), (0, 1))
    np.testing.assert_array_equal(back[:8, :8], SCAN)


def test_every_place_of_every_scan_is_offered_once():
    videos = DigitVideos(DATA, "test")
    places = 5 * 12  # lanes, and places along each
    assert len(videos) == len(load("test")[0]) * 4 * places
    first = {videos.frames(index)[0].tobytes() for index in range(places)}
    assert len(first) == places
    assert videos[0]["video"].shape == (24, 12, 12, 1)


@pytest.mark.slow
def test_true_videos_pass_every_bar():
    found = measured(true_videos()[0])
    assert min(found.direction) == 1.0
    assert max(found.phase) < 1e-6
    assert min(found.digit) > 0.97
    bars = drift.bars(found)
    assert all(bars.values()), drift.bars_as_text(bars)


FALSE = {
    "frozen": lambda videos: np.repeat(videos[:, :1], 24, axis=1),
    "reversed": lambda videos: videos[:, ::-1],
    "twice as fast": lambda videos: np.concatenate([videos[:, ::2]] * 2, axis=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FALSE)
def test_videos_that_move_falsely_have_no_right_direction(name: str):
    found = measured(FALSE[name](true_videos()[0]))
    assert max(found.direction) == 0.0
    assert found.phase[-1] > 1.0


def test_a_jump_is_a_phase_error_and_shows_in_its_block_alone_as_direction():
    videos = true_videos()[0].copy()
    videos[:, 12:] = np.roll(videos[:, 12:], (4, 4), (2, 3))
    found = measured(videos)
    assert [d == 1.0 for d in found.direction] == [True] * 4 + [False] + [True] * 3
    np.testing.assert_allclose(found.phase, [0.0] * 4 + [32**0.5] * 4, atol=1e-6)


def test_a_trend_is_told_from_noise():
    rng = np.random.default_rng(0)
    slope, error = drift.slope(0.1 * np.arange(13) + 0.01 * rng.normal(size=13))
    assert slope == pytest.approx(0.1, abs=0.01)
    assert slope > 20 * error
    assert drift.slope([1.0] * 13) == (0.0, 0.0)


# ---- whole clips, with edges ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> tuple[np.ndarray, list[str]]:
    """Two hundred videos of digits that the judge was not fitted on."""
    source = DigitVideos(WHOLE, "test")
    chosen = range(0, 7180, 36)
    return np.stack([source.frames(i) for i in chosen]).astype(float), [
        source.prompt(i) for i in chosen
    ]


@pytest.mark.slow
def test_real_digits_are_named():
    found = judge(WHOLE).score_of_real()
    assert found.videos == 4 * 359
    assert found.digit / found.videos > 0.985
    assert found.direction == found.videos


def test_backwards_is_the_wrong_direction(real: Any):
    videos, prompts = real
    found = judge(WHOLE).score(videos[:, ::-1], prompts)
    assert (found.direction, found.digit) == (0, judge(WHOLE).score(videos, prompts).digit)


def test_noise_is_named_by_chance(real: Any):
    noise = np.random.default_rng(0).uniform(0, 16, real[0].shape)
    found = judge(WHOLE).score(noise, real[1])
    assert found.digit < 0.3 * found.videos
    assert found.direction < 0.45 * found.videos


def test_groups_are_counted_apart(real: Any):
    videos, prompts = real
    found = scores(judge(WHOLE), videos, prompts, held_out=("a seven moving left",))
    never = prompts.count("a seven moving left")
    assert 0 < never == found["never trained on"].videos
    assert found["trained on"].videos == len(prompts) - never
    assert found["all prompts"].digit == found["trained on"].digit + found["never trained on"].digit
    assert "never trained on" not in scores(judge(WHOLE), videos, prompts, held_out=())
