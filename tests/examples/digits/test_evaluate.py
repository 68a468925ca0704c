"""The judge: right about real digits, wrong where the videos are."""

from __future__ import annotations

import numpy as np
import pytest
from digits.evaluate import Judge, Score, around_ink, as_text, centre_of_ink, scores
from digits.settings import DataSettings
from digits.videos import DigitVideos
from digits.words import DIRECTIONS

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


def test_upright_is_not_lying(judge: Judge, real: tuple[np.ndarray, list[str]]):
    videos, prompts = real
    assert judge.score(videos.swapaxes(2, 3), prompts).direction == 0


def test_another_prompt_is_wrong(judge: Judge, real: tuple[np.ndarray, list[str]]):
    videos, prompts = real
    other = [
        f"a{'n' if word == 'eight' else ''} {word} moving {way}"
        for word, way in map(next_of, prompts)
    ]
    found = judge.score(videos, other)
    assert found.direction == 0
    assert found.digit < 0.05 * len(videos)


def next_of(prompt: str) -> tuple[str, str]:
    """Return the next digit's word and the next direction."""
    from digits.words import DIGITS

    _, word, _, way = prompt.split()
    return DIGITS[(DIGITS.index(word) + 1) % 10], DIRECTIONS[(DIRECTIONS.index(way) + 1) % 4]


def test_noise_is_named_by_chance(judge: Judge, real: tuple[np.ndarray, list[str]]):
    noise = np.random.default_rng(0).uniform(0, 16, real[0].shape)
    found = judge.score(noise, real[1])
    assert found.digit < 0.3 * found.videos
    assert found.direction < 0.45 * found.videos


def test_an_empty_video_is_no_error(judge: Judge):
    assert (
        judge.score(np.zeros((2, 5, 12, 12)), ["a one moving up", "a one moving left"]).videos == 2
    )


def test_the_centre_of_ink():
    frame = np.zeros((1, 12, 12))
    frame[0, 3, 4] = frame[0, 5, 4] = 8.0
    np.testing.assert_allclose(centre_of_ink(frame), [[4.0, 4.0]], atol=1e-3)
    assert around_ink(frame).shape == (1, 64)
    assert around_ink(frame).sum() == 16.0


def test_groups_are_counted_apart(judge: Judge, real: tuple[np.ndarray, list[str]]):
    videos, prompts = real
    found = scores(judge, videos, prompts, held_out=("a seven moving left",))
    never = prompts.count("a seven moving left")
    assert 0 < never == found["never trained on"].videos
    assert found["trained on"].videos == len(prompts) - never
    assert found["all prompts"].digit == found["trained on"].digit + found["never trained on"].digit
    assert "never trained on" not in scores(judge, videos, prompts, held_out=())


def test_a_score_in_words():
    found = as_text({"all prompts": Score(400, 396, 400)})
    assert found == "  all prompts       digit  396/400  99.0%   direction  400/400 100.0%"
