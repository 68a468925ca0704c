"""Changes of prompt: what training shows of them, what a rollout sees, and how it is measured."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxattn_examples.digits import flow, stream_switch
from maxattn_examples.digits.evaluate import Judge
from maxattn_examples.digits.settings import DataSettings
from maxattn_examples.digits.switches import switched
from maxattn_examples.digits.task import DigitsTask
from maxattn_examples.digits.torus import rolled
from maxattn_examples.digits.videos import DigitVideos, load
from maxattn_examples.digits.words import all_prompts

from .streamed import clips, words
from .streamed import streaming as described

STREAM = described().stream
TORUS = DataSettings(frames=6, torus=True, speed=2, lane_spread=0)


def test_frames_before_a_block_show_what_was_before():
    assert STREAM is not None
    video, before = jnp.ones((512, 8, 1, 1, 1)), jnp.zeros((512, 8, 1, 1, 1))
    clip = switched(jax.random.key(0), video, before, jnp.full(512, 0.5), STREAM)
    found = np.asarray(clip)[..., 0, 0, 0]
    starts = (found == 0).sum(axis=1)
    np.testing.assert_array_equal(found, np.arange(8) >= starts[:, None])
    counts = {int(n): int((starts == n).sum()) for n in np.unique(starts)}
    assert set(counts) == {0, 2, 4, 6}  # no change, or one at block 1, 2 or 3
    assert 200 < counts[0] < 312 and all(50 < counts[n] < 120 for n in (2, 4, 6))


@pytest.mark.slow
def test_only_the_clean_clip_shows_what_was_before():
    settings = described(training={"prompt_switches": 0.999, "context_noise": 0.0})
    clean, before = clips(settings)
    how = settings.training.replace(prompt_dropout=0.0)
    found = flow.forced(clean, words(), jax.random.key(1), how, settings.stream, before)
    old = np.abs(np.asarray(found["context"] - before)).max((2, 3, 4)) < 1e-6
    new = np.abs(np.asarray(found["context"] - clean)).max((2, 3, 4)) < 1e-6
    assert (old ^ new).all() and old[:, 0].all() and new[:, -1].all()
    t = found["times"][..., None, None, None]
    np.testing.assert_allclose(found["mixed"] - t * found["velocity"], clean, atol=1e-5)
    np.testing.assert_array_equal(found["words"], words())
    # Without a prompt nothing says another digit.
    how = settings.training.replace(prompt_dropout=0.999)
    found = flow.forced(clean, words(), jax.random.key(1), how, settings.stream, before)
    assert not found["words"].any()
    np.testing.assert_allclose(found["context"], clean, atol=1e-6)


@pytest.mark.slow
def test_the_other_digit_is_on_the_same_path():
    source = DigitVideos(TORUS)
    scans, labels = load("train")
    for index in range(0, len(source), len(source) // 10):
        digit, direction = all_prompts()[source.prompt(index)]
        lane, start = TORUS.paths[index % len(TORUS.paths)]
        found = source.before(index)
        same = [
            n for n, scan in enumerate(scans)
            if np.array_equal(rolled(scan, direction, lane, start, TORUS), found)
        ]  # fmt: skip
        assert same and all(labels[n] != digit for n in same)
        np.testing.assert_array_equal(found, source.before(index))


def test_a_run_offers_it_only_where_prompts_change():
    assert "before" not in DigitsTask(described()).source().shapes
    settings = described(training={"prompt_switches": 0.5})
    assert set(DigitsTask(settings).source()[3]) == {"video", "tokens", "before"}


# ---- what is measured ----------------------------------------------------------------------------


@cache
def judge() -> Judge:
    return Judge(TORUS)


BEFORE = [p for p, (digit, _) in all_prompts().items() if digit in (0, 4, 6, 7)]


def shown(late: int) -> Any:
    """Draw real digits that change `late` blocks after the prompt does, and measure them."""
    after, (scans, labels) = stream_switch.other_digits(BEFORE), load("train")
    data, videos = TORUS.replace(frames=18), []
    for old, new in zip(BEFORE, after, strict=True):
        (a, direction), (b, _) = all_prompts()[old], all_prompts()[new]
        first, second = (rolled(scans[labels == n][0], direction, 2, 0, data) for n in (a, b))
        videos.append(np.concatenate([first[: 6 + 3 * late], second[6 + 3 * late :]]))
    ink = np.stack(videos).astype(np.float64)
    return stream_switch.measure(judge(), ink, BEFORE, after, 3, 2)


@pytest.mark.slow
def test_digits_that_follow_the_prompt_pass_and_others_do_not():
    found = shown(late=0)
    assert all(found.bars.values()), str(found)
    assert found.asked.digit == (*found.first.digit[:2], *found.second.digit[2:])
    assert found.second.digit[0] < 0.2 and found.first.digit[-1] < 0.2
    text = str(found).splitlines()
    assert len(text) == 8 and "another prompt" in text[3]
    never = shown(late=3)
    assert not never.bars["second digit from block 3 after it at least 90%"]
    turned = replace(found.second, direction=(1.0, 1.0, 0.5, 1.0, 1.0, 1.0))
    bars = replace(found, second=turned).bars
    assert [name for name, ok in bars.items() if not ok] == ["direction after it at least 95%"]


def test_other_digits_move_alike():
    prompts = list(all_prompts())
    for old, new in zip(prompts, stream_switch.other_digits(prompts), strict=True):
        (a, way), (b, same) = all_prompts()[old], all_prompts()[new]
        assert way == same and a != b
