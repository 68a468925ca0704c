"""The settings of a rollout: the shipped file, derived values, and refused ones.

Messages: golden/rollout.txt.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from maxattn_examples.common.settings import RolloutSettings
from maxattn_examples.wan.settings import Settings
from yaml import safe_load

import maxattn as ma
from maxattn.config import AttentionConfig
from maxattn.errors import ConfigError
from tests.examples.conftest import ROOT
from tests.golden_text import check_refused

SHIPPED = ROOT / "configs" / "wan_1_3b_stream.yml"

BAD = {
    "unknown_key": "windw: 4",
    "window_zero": "window: 0",
    "sink_without_window": "sink: 3",
    "sink_leaves_no_room": "window: 2\n  sink: 4",
    "no_steps": "denoising_steps: []",
    "step_of_zero": "denoising_steps: [1000, 500, 0]",
    "steps_that_rise": "denoising_steps: [1000, 250, 500]",
    "step_beyond_noise": "denoising_steps: [1001, 500]",
    "one_step_without_a_list": "denoising_steps: 1000",
    "noise_without_clean_pass": "context_noise: 14.0\n  clean_pass: false",
    "context_of_noise_alone": "context_noise: 1000",
    "slots_with_a_sink": "positions: slots\n  window: 4\n  sink: 3",
    "positions_misspelt": "positions: absolut",
    "cache_in_integers": "cache_dtype: int8",
    "alone_in_words": "first_frame_alone: first",
    "several_at_once": "window: 1\n  sink: 3\n  frames_per_block: 0\n  warp: true",
}


def test_the_shipped_file_names_every_setting_of_a_rollout():
    shipped = safe_load(SHIPPED.read_text())
    assert set(shipped["rollout"]) == set(RolloutSettings.model_fields)
    settings = Settings.from_yaml(SHIPPED)
    assert settings.rollout.stream(1560) == ma.Stream(1560, 3, window=7)
    assert settings.model.sizes == "wan-2.1-t2v-1.3b"


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_rollout_is_refused_with_file_and_line(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("stream.yml").write_text(f"rollout:\n  {BAD[name]}\n")
    check_refused(f"rollout/{name}", ConfigError, lambda: Settings.from_yaml("stream.yml"))


def test_times_are_moved_by_the_shift():
    """1000 shift u / (1 + (shift - 1) u): by hand for 750, 500 and 250 with shift 5."""
    assert RolloutSettings().times == pytest.approx((1000, 937.5, 2500 / 3, 625))
    as_written = RolloutSettings(warp_steps=False).times
    assert as_written == (1000, 750, 500, 250)
    assert RolloutSettings(timestep_shift=1.0).times == as_written


def test_the_stream_is_that_of_the_settings():
    of = RolloutSettings(frames_per_block=4, window=3, sink=8, first_frame_alone=True)
    assert of.stream(880) == ma.Stream(880, 4, 3, 8, True)


def test_attention_leaves_the_section_to_its_program():
    assert AttentionConfig.from_yaml(SHIPPED, ["attention=flash"]).attention == "flash"


def test_an_override_finds_the_section():
    overrides = ["window=4", "sink=3", "rollout.timestep_shift=8"]
    found = Settings.from_yaml(SHIPPED, overrides).rollout
    assert (found.window, found.sink, found.timestep_shift) == (4, 3, 8.0)


@pytest.mark.parametrize("path", sorted(Path("tests/tools/self_forcing").glob("[!w]*.yml")))
def test_files_of_self_forcing_become_settings(path: Path):
    found = RolloutSettings.from_self_forcing(path)
    assert found.config.stream(1560).frames_per_block == found.config.frames_per_block
    assert found.notes or found.left_out


def test_the_window_of_longlive_is_four_blocks_with_a_sink_of_three_frames():
    found = RolloutSettings.from_self_forcing("tests/tools/self_forcing/slots.yml").config
    assert found.stream(1560) == ma.Stream(1560, 3, 4, 3)
    assert found.positions == "slots_with_sink"
    assert found.times == pytest.approx((1000, 937.5, 2500 / 3, 625))
