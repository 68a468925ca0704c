"""The settings of the demo: the shipped files, overrides and what is refused.

Messages of streams: golden/digits.txt.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from maxattn_examples.common.command import parser_of
from maxattn_examples.digits.settings import Settings
from maxattn_examples.digits.task import DigitsTask
from maxattn_examples.train.loop import Training
from yaml import safe_load

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from tests.examples.conftest import ROOT
from tests.golden_text import check_golden, check_refused

SHIPPED = ROOT / "configs" / "wan_tiny.yml"
STREAMED = ROOT / "configs" / "wan_tiny_stream.yml"


def test_a_bare_key_finds_its_section():
    overrides = ["attention=dot_product", "steps=20", "dim=48", "prompt=a seven moving left"]
    settings = Settings.from_yaml(SHIPPED, overrides)
    found = (settings.attention, settings.training.steps, settings.model.dim)
    assert found == ("dot_product", 20, 48)
    assert settings.sampling.prompt == "a seven moving left"
    assert Settings.from_yaml(SHIPPED, ["training.steps=20"]).training.steps == 20


BOTH_HAVE_SEED = "training and sampling both have a key 'seed'"
REFUSED = {
    "stepss=20": ("stepss: 20", "did you mean"),
    "training.stepss=20": ("training.stepss", "did you mean 'steps'?"),
    "seed=1": (BOTH_HAVE_SEED, "write training.seed or sampling.seed"),
    "steps=0": ("training.steps: 0",),
    "patch=[1, 5, 4]": ("model.patch: [1, 5, 4]", "divides 12", "1, 2, 3, 4, 6, 12"),
    "dim_head=25": ("model.dim_head: 25", "even", "use 26"),
    "frames=6": ("data.frames: 6", "at most 5"),
    "lane_spread=3": ("data.lane_spread: 3", "at most 2"),
    "held_out=[a sevn moving left]": ("'a sevn moving left'", "mean 'a seven moving left'?"),
    "learning_rate=nan": ("training.learning_rate", "a finite number above 0.0", "such as 0.5"),
    "canvas=7": ("data.canvas: 7",),
    "prompt_dropout=1.0": ("training.prompt_dropout: 1.0",),
}


@pytest.mark.parametrize("override", REFUSED)
def test_wrong_settings_are_refused_with_a_remedy(override: str):
    with pytest.raises(ConfigError) as error:
        Settings.from_yaml(SHIPPED, [override])
    assert all(word in str(error.value) for word in REFUSED[override]), str(error.value)


def test_a_time_of_odd_width_is_refused_with_the_rest():
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*dim_head.*time_dim"):
        Settings.from_yaml(SHIPPED, ["dim_head=25", "time_dim=7"])


def test_what_usage_requires(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parser_of("").parse_intermixed_args([])
    assert "required: config\n" in capsys.readouterr().err
    assert parser_of("").parse_intermixed_args(["x.yml"]).overrides == []


# ---- streamed digits -----------------------------------------------------------------------------


# What says nothing here, or is null unless one prompt is drawn.
UNSAID = {"first_frame_alone", "positions", "cache_dtype", "prompt"}


def test_the_shipped_file_says_what_a_block_sees():
    stream = Settings.from_yaml(STREAMED).stream
    assert stream is not None
    assert (stream.tokens_per_frame, stream.frames_per_block, stream.budget) == (4, 3, 9)
    assert Settings.from_yaml(SHIPPED).stream is None


@pytest.mark.parametrize("path", [STREAMED], ids=lambda path: path.stem)
def test_the_shipped_files_name_every_setting(path: Path):
    shipped, settings = safe_load(path.read_text()), Settings.from_yaml(path)
    unsaid = UNSAID if path == STREAMED else set()
    for section in shipped.keys() & {"model", "data", "training", "sampling", "rollout"}:
        names = set(getattr(settings, section).resolved()) - unsaid
        assert set(shipped[section]) == names, section
    assert ("rollout" in shipped) == (path == STREAMED)


REFUSED_STREAMS = {
    "no_torus": ["torus=false", "data.frames=3", "speed=1", "start_every=1"],
    "speed": ["torus=false", "data.frames=3", "rollout=null"],
    "part_of_a_block": ["data.frames=11"],
    "patch_of_frames": ["patch=[2, 6, 6]"],
    "first_frame_alone": ["first_frame_alone=true"],
    "slots": ["positions=slots_with_sink"],
    "no_sink": ["sink=0"],
    "sink_of_a_part": ["sink=2"],
    "context_of_none": ["forcing=none", "sink_distance=0"],
    "forcing": ["forcing=teach"],
    "switches_of_none": ["forcing=diffusion", "context_noise=0", "context_dropout=0"],
    "switches_in_a_block": ["data.frames=3", "sink=0", "sink_distance=0"],
    "context_noise": ["training.context_noise=1000.0"],
    "blocks": ["rollout.blocks=0"],
}


@pytest.mark.parametrize("case", REFUSED_STREAMS)
def test_streams_that_cannot_be_are_refused(case: str):
    with pytest.raises(ConfigError) as error:
        Settings.from_yaml(STREAMED, REFUSED_STREAMS[case])
    # Lines of the shipped file change with its comments.
    said = re.sub(rf"{STREAMED}(:\d+)?", STREAMED.name, str(error.value))
    check_golden(f"digits/{case}", said)


def test_forcing_without_blocks_is_refused_before_training():
    settings = Settings.from_yaml(STREAMED, ["rollout=null"])
    check_refused("digits/no_rollout", ConfigErrors, lambda: Training(DigitsTask(settings)))
