"""The videos: the same each time, moving as their prompts say, and none of a held-out prompt."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from maxattn_examples.common.pictures import from_model, to_model
from maxattn_examples.digits import text, videos
from maxattn_examples.digits.settings import DataSettings
from maxattn_examples.digits.words import DIRECTIONS, STEPS, prompt_of
from maxattn_examples.train.data import batches

from tests.examples.conftest import HELD_OUT

DATA = DataSettings(held_out=tuple(HELD_OUT))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_each_frame_is_the_last_one_moved_a_pixel(direction: str):
    scan = videos.load("train")[0][3]
    rows, columns = STEPS[direction]
    for lane in DATA.lanes:
        video = videos.move(scan, direction, lane, 0, DATA)
        for before, after in pairwise(video):
            np.testing.assert_array_equal(after, np.roll(before, (rows, columns), (0, 1)))
            assert after.sum() == scan.sum(), "no ink leaves the canvas"


def test_a_video_in_pictures():
    scan = np.zeros((8, 8), np.uint8)
    scan[0, 0] = 1
    data = DataSettings(frames=3, canvas=10, lane_spread=0)
    steps = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
    for direction in DIRECTIONS:
        row, column = steps[direction]
        seen = [tuple(np.argwhere(f)[0]) for f in videos.move(scan, direction, 1, 0, data)]
        assert seen == [(1 + row * n, 1 + column * n) for n in (-1, 0, 1)], direction


def test_held_out_prompts_never_reach_a_batch():
    never = {tuple(row) for row in text.encode(HELD_OUT)}
    drawn = batches(videos.DigitVideos(DATA), 64, seed=1)
    seen = {tuple(row) for _ in range(20) for row in next(drawn)["tokens"]}
    assert len(seen) == 36
    assert not seen & never


def test_the_digit_of_a_video_is_the_one_of_its_prompt():
    source = videos.DigitVideos(DataSettings())
    scans, labels = videos.load("train")
    index = 5 * 4 * 100  # five places and four directions a scan
    assert source.prompt(index) == prompt_of(labels[100], "left")
    np.testing.assert_array_equal(source.frames(index)[-1, 0:8, 0:8], scans[100])


def test_scans_are_for_training_or_kept_aside():
    train, test = videos.load("train")[0], videos.load("test")[0]
    assert (len(train), len(test)) == (1438, 359)
    assert not {scan.tobytes() for scan in train} & {scan.tobytes() for scan in test}


def test_scaling_comes_back():
    ink = np.arange(17, dtype=np.uint8).reshape(1, 17)
    scaled = to_model(ink)
    assert (scaled.min(), scaled.max(), scaled.shape) == (-1.0, 1.0, (1, 17, 1))
    np.testing.assert_array_equal(from_model(scaled), ink)
    assert from_model(np.array([[[-3.0], [3.0]]])).tolist() == [[0.0, 16.0]]
