"""The judge: right about real digits, wrong where the videos are."""

from __future__ import annotations

import numpy as np
import pytest
from digits.evaluate import Judge, scores
from digits.settings import DataSettings
from digits.videos import DigitVideos

DATA = DataSettings()


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(DATA)


@pytest.fixture(scope="module")
def real() -> tuple[np.ndarray, list[str]]:
    """Two hundred videos of digits that the judge was not fitted on."""
    source = DigitVideos(DATA, "test")
    chosen = range(0, 7180, 36)
    return np.stack([source.frames(i) for i in chosen]).astype(float), [
        source.prompt(i) for i in chosen
    ]


def test_real_digits_are_named(judge: Judge):
    found = judge.score_of_real()
    assert found.videos == 4 * 359
    assert found.digit / found.videos > 0.985
    assert found.direction == found.videos


def test_backwards_is_the_wrong_direction(judge: Judge, real: tuple[np.ndarray, list[str]]):
    videos, prompts = real
    found = judge.score(videos[:, ::-1], prompts)
    assert (found.direction, found.digit) == (0, judge.score(videos, prompts).digit)


def test_noise_is_named_by_chance(judge: Judge, real: tuple[np.ndarray, list[str]]):
    noise = np.random.default_rng(0).uniform(0, 16, real[0].shape)
    found = judge.score(noise, real[1])
    assert found.digit < 0.3 * found.videos
    assert found.direction < 0.45 * found.videos


def test_groups_are_counted_apart(judge: Judge, real: tuple[np.ndarray, list[str]]):
    videos, prompts = real
    found = scores(judge, videos, prompts, held_out=("a seven moving left",))
    never = prompts.count("a seven moving left")
    assert 0 < never == found["never trained on"].videos
    assert found["trained on"].videos == len(prompts) - never
    assert found["all prompts"].digit == found["trained on"].digit + found["never trained on"].digit
    assert "never trained on" not in scores(judge, videos, prompts, held_out=())
