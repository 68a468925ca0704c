"""The settings of the demo: the shipped file, overrides and what is refused."""

from __future__ import annotations

import pytest
from digits.settings import Settings
from digits.words import all_prompts

from maxattn.errors import ConfigError
from tests.examples.conftest import ROOT

SHIPPED = ROOT / "configs" / "wan_tiny.yml"


def test_the_shipped_file_holds_four_prompts_of_different_digits_and_directions_out():
    pairs = [all_prompts()[prompt] for prompt in Settings.from_yaml(SHIPPED).data.held_out]
    digits, directions = zip(*pairs, strict=True)
    assert (len(set(digits)), len(set(directions))) == (4, 4)


def test_the_shipped_file_names_every_setting_of_the_demo():
    from yaml import safe_load

    shipped = safe_load(SHIPPED.read_text())
    for section in ("model", "data", "training", "sampling"):
        assert set(shipped[section]) == set(getattr(Settings(), section).resolved()), section


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
    from common.command import parser_of

    with pytest.raises(SystemExit):
        parser_of("").parse_intermixed_args([])
    assert "required: config\n" in capsys.readouterr().err
    assert parser_of("").parse_intermixed_args(["x.yml"]).overrides == []
