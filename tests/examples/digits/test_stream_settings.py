"""The settings of streamed digits: the shipped file, and what is refused.

Messages: golden/digits.txt.
"""

from __future__ import annotations

import re

import pytest
from digits.settings import Settings
from digits.task import DigitsTask
from train.loop import Training
from yaml import safe_load

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from tests.examples.conftest import ROOT
from tests.golden_text import check_golden

SHIPPED = ROOT / "configs" / "wan_tiny_stream.yml"
WHOLE = ROOT / "configs" / "wan_tiny.yml"
# What says nothing here, or is null unless one prompt is drawn.
UNSAID = {"first_frame_alone", "positions", "cache_dtype", "prompt"}


def test_the_shipped_file_says_what_a_block_sees():
    stream = Settings.from_yaml(SHIPPED).stream
    assert stream is not None
    assert (stream.tokens_per_frame, stream.frames_per_block, stream.budget) == (4, 3, 9)
    assert Settings.from_yaml(WHOLE).stream is None


def test_the_shipped_file_names_every_setting():
    shipped, settings = safe_load(SHIPPED.read_text()), Settings.from_yaml(SHIPPED)
    for section in ("model", "data", "training", "sampling", "rollout"):
        names = set(getattr(settings, section).resolved()) - UNSAID
        assert set(shipped[section]) == names, section


REFUSED = {
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


@pytest.mark.parametrize("case", REFUSED)
def test_streams_that_cannot_be_are_refused(case: str):
    with pytest.raises(ConfigError) as error:
        Settings.from_yaml(SHIPPED, REFUSED[case])
    # Lines of the shipped file change with its comments.
    said = re.sub(rf"{SHIPPED}(:\d+)?", SHIPPED.name, str(error.value))
    check_golden(f"digits/{case}", said)


def test_forcing_without_blocks_is_refused_before_training():
    settings = Settings.from_yaml(SHIPPED, ["rollout=null"])
    with pytest.raises(ConfigErrors) as error:
        Training(DigitsTask(settings))
    check_golden("digits/no_rollout", str(error.value))
