"""One digit that moves for ever: its clips, the inputs of forcing, and the judge of videos."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxattn_examples.digits import stream_demo, torus
from maxattn_examples.digits.settings import ClipData, Settings
from maxattn_examples.digits.stream_demo import Drift, Switched, TorusJudge
from maxattn_examples.digits.task import ClipTask
from maxattn_examples.digits.torus import Clip, Scans
from maxattn_examples.digits.words import ALL, STEPS, TORUS

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, InputError
from tests.examples.conftest import ROOT, train

CONFIG = ROOT / "configs" / "wan_tiny_stream.yml"
DATA = ClipData(source="torus")
SMALL = (
    "num_attention_heads=2", "attention_head_dim=8", "num_layers=1", "ffn_dim=16", "freq_dim=8",
    "training.steps=3", "training.batch_size=4", "training.warmup_steps=1", "in_channels=15",
    "data.frames=8", "frames_per_block=2", "sink=2", "denoising_steps=[1000]",
    "rollout.blocks=2", "long_blocks=3", "switch_block=1", "per_prompt=1",
)  # fmt: skip
STREAM = Settings.from_yaml(CONFIG, SMALL).rollout.stream(4)


def videos(scans: Any, digits: Any, ways: Any, frames: int, starts: Any = 0) -> np.ndarray:
    """Render moving scans, ink from 0 to 16."""
    count = len(scans)
    digits, ways = (jnp.broadcast_to(jnp.asarray(x), count) for x in (digits, ways))
    clip = Clip(digits, ways, digits, digits, jnp.broadcast_to(jnp.asarray(starts), count))
    shown = jax.jit(torus.render, static_argnums=(2, 3))(jnp.asarray(scans), clip, DATA, frames)
    return np.asarray((shown + 1) * 8).round().astype(np.float64)


@pytest.mark.parametrize("way", range(4))
def test_a_digit_is_rolled_from_frame_to_frame_and_back_where_it_was_after_a_turn(way: int):
    scan = torus.load("test")[0][:1]
    found = videos(scan / 16, 0, way, 12, 6)[0]
    for before, after in pairwise(found):
        np.testing.assert_array_equal(after, np.roll(before, 2 * STEPS[way], (0, 1)))
    np.testing.assert_array_equal(found[:6], found[6:])
    assert (found.sum((1, 2)) == scan.sum()).all()
    row, column = (6, 2) if STEPS[way][0] else (2, 6)
    np.testing.assert_array_equal(np.roll(found[0], (-row, -column), (0, 1))[:8, :8], scan[0])


def test_clips_show_what_their_prompts_say_and_depend_on_their_numbers_alone():
    scans, labels = Scans.of("train"), np.sort(torus.load("train")[1])
    draw = jax.jit(lambda numbers: torus.draw(0, numbers, scans.first, DATA))
    clip = jax.tree.map(np.asarray, draw(jnp.arange(400)))
    assert (labels[clip.scan] == clip.digit).all() and (labels[clip.before] != clip.digit).all()
    assert set(np.asarray(clip.start).tolist()) == {0, 6}
    assert len({*zip(clip.digit.tolist(), clip.way.tolist(), strict=True)}) == 40
    again = draw(jnp.arange(10, 20))
    np.testing.assert_array_equal(again.scan, clip.scan[10:20])


def test_latents_are_turned_back_into_ink_and_places_name_each_token():
    clip = videos(Scans.of("test").ink[:2], [1, 2], 0, 3)
    latents = torus.to_latents(jnp.asarray(clip / 8 - 1, jnp.float32))
    assert latents.shape == (2, 3, 4, 4, 9)
    np.testing.assert_allclose(torus.to_ink(np.asarray(latents)), clip, atol=1e-5)
    places = torus.places(6, 3, 12)
    tokens = places[:, ::2, ::2].reshape(24, 7)
    assert len(np.unique(tokens, axis=0)) == 12
    np.testing.assert_array_equal(tokens[:12], tokens[12:])


def test_prompts_have_states_and_unknown_words_are_refused():
    states = TORUS.encode([*ALL, ""])
    assert len(np.unique(states.reshape(41, -1), axis=0)) == 41 and not states[-1].any()
    assert TORUS.prompt_of([(8, 1)]) == "an eight moving right"
    for prompt in ("a cat moving left", "a seven", "a one moving up and a two moving up"):
        with pytest.raises(InputError):
            TORUS.encode([prompt])


# ---- forcing -------------------------------------------------------------------------------------


def test_frames_before_a_block_show_what_was_before():
    video, before = jnp.ones((512, 8, 1, 1, 1)), jnp.zeros((512, 8, 1, 1, 1))
    clip = torus.switched(jax.random.key(0), video, before, jnp.full(512, 0.5), STREAM)
    starts = (np.asarray(clip)[..., 0, 0, 0] == 0).sum(axis=1)
    counts = {int(n): int((starts == n).sum()) for n in np.unique(starts)}
    assert set(counts) == {0, 2, 4, 6}  # no change, or one at block 1, 2 or 3
    assert 200 < counts[0] < 312 and all(50 < counts[n] < 120 for n in (2, 4, 6))


def test_sinks_are_trained_at_distances_of_whole_turns():
    numbers = np.asarray(torus.turned(jax.random.key(1), (64, 8), 6, 24, STREAM))
    np.testing.assert_array_equal(numbers[:, :2], [[0, 1]] * 64)
    further = numbers[:, 2:] - np.arange(2, 8)
    assert (further == further[:, :1]).all()
    assert set(further[:, 0].tolist()) == {0, 6, 12, 18, 24}


@pytest.mark.parametrize("dropout", [0.0, 0.999])
def test_only_the_clean_clip_of_a_prompt_shows_what_was_before(dropout: float):
    how = ("prompt_switches=0.999", "training.context_noise=0", "context_dropout=0")
    task = ClipTask.of(Settings.from_yaml(CONFIG, [*SMALL, *how, f"condition_dropout={dropout}"]))
    empty = {name: jnp.asarray(x) for name, x in task.source().empty.items()}
    found = jax.jit(task.noised)({"clip": jnp.arange(4)}, empty, jax.random.key(0))
    t = found["times"][..., None, None, None]
    clean = found["mixed"] - t * found["velocity"]
    same = np.abs(found["context"] - clean).max((2, 3, 4)) < 1e-5
    assert same[:, -2:].all() and same[:, :2].all() == bool(dropout)
    assert found["text"].any() != bool(dropout)
    assert found["condition"].shape == (4, 6, 8, 4, 4) and found["positions"].shape == (4, 8)


NO_CONTEXT = "training.context_noise=0 context_dropout=0"
REFUSED = {
    f"training.forcing=none {NO_CONTEXT}": "sink_distance",
    "sink=0": "sink_distance",
    f"sink_distance=0 forcing=diffusion {NO_CONTEXT}": "prompt_switches",
    "data.canvas=14": "a token is 6 x 6 pixels",
    "data.source=digits": "these clips are for training without forcing",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_streams_that_cannot_be_are_refused(overrides: str):
    with pytest.raises(ConfigError, match=REFUSED[overrides]):
        Settings.from_yaml(CONFIG, overrides.split())


def test_clips_that_do_not_fit_the_model_are_refused():
    with pytest.raises(ConfigErrors, match="in_channels 16, out_channels 9, text_dim 29"):
        train(Settings.from_yaml(CONFIG, ["in_channels=17", "text_dim=30"]))


@pytest.mark.slow
def test_a_run_from_training_to_pictures(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(stream_demo, "TorusJudge", lambda *_: judge())
    settings = Settings.from_yaml(CONFIG, [*SMALL, f"output_dir={tmp_path}"])
    model, losses = train(settings)
    assert len(losses) == 3 and np.isfinite(losses).all()
    found = stream_demo.demo(model, settings)
    assert set(found) == set(json.loads((tmp_path / "figures.json").read_text()))
    assert {name: len(drift.digit) for name, drift in found.items()} == {
        "streamed": 2, "no clean pass": 2, "long": 3, "switched": 4, "switched: first digit": 4,
    }  # fmt: skip
    for name in ("long.gif", "switch.gif", "quality.png"):
        assert (tmp_path / name).stat().st_size > 1000, name
    assert "FAIL  digit in block 1 at least 97%" in capsys.readouterr().out


# ---- the judge -----------------------------------------------------------------------------------


@cache
def judge() -> TorusJudge:
    """Fit a classifier once."""
    return TorusJudge(12, 2)


@cache
def true_videos() -> np.ndarray:
    """Render scans that the judge was not fitted on: two for each of the forty prompts."""
    scans, labels = torus.load("test")
    chosen = np.concatenate([scans[labels == digit][5:7] for digit, _ in ALL.values()])
    digits, ways = (np.repeat(x, 2) for x in zip(*ALL.values(), strict=True))
    return videos(chosen / 16, digits, ways, 24, np.arange(80) % 2 * 6)


PROMPTS = [prompt for prompt in ALL for _ in range(2)]


def measured(shown: np.ndarray) -> Drift:
    return judge().measure(shown, PROMPTS, 3)


def test_true_videos_pass_every_bar():
    found = measured(true_videos())
    assert min(found.direction) == 1.0 and max(found.phase) < 1e-6
    assert all(found.bars.values()), found.table()


FALSE = {
    "frozen": lambda shown: np.repeat(shown[:, :1], 24, axis=1),
    "reversed": lambda shown: shown[:, ::-1],
    "twice as fast": lambda shown: np.concatenate([shown[:, ::2]] * 2, axis=1),
}


@pytest.mark.parametrize("name", FALSE)
def test_videos_that_move_falsely_have_no_right_direction(name: str):
    found = measured(FALSE[name](true_videos()))
    assert max(found.direction) == 0.0 and found.phase[-1] > 1.0


def test_a_jump_is_a_phase_error_and_shows_in_its_block_alone_as_direction():
    shown = true_videos().copy()
    shown[:, 12:] = np.roll(shown[:, 12:], (4, 4), (2, 3))
    found = measured(shown)
    assert [d == 1.0 for d in found.direction] == [True] * 4 + [False] + [True] * 3
    np.testing.assert_allclose(found.phase, [0.0] * 4 + [32**0.5] * 4, atol=1e-6)


def test_digits_that_follow_a_new_prompt_pass_and_others_do_not():
    after = [TORUS.prompt_of([((ALL[p][0] + 3) % 10, ALL[p][1])]) for p in PROMPTS]
    new = true_videos()[[PROMPTS.index(prompt) for prompt in after]]
    for late, passes in ((0, True), (3, False)):
        at = 6 + 3 * late
        shown = np.concatenate([true_videos()[:, :at], new[:, at:18]], 1)
        found = Switched.of(judge(), shown, (PROMPTS, after), 2, 3)
        assert found.bars["second digit from block 3 after it at least 90%"] == passes
    assert found.asked.digit == (*found.first.digit[:2], *found.second.digit[2:])
