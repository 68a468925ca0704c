"""Every bad YAML file of tests/config/bad gives the message of tests/golden/config.txt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from maxattn.config import AttentionConfig
from maxattn.config.errors import ConfigErrors
from tests.config.settings import Settings
from tests.golden_text import check_golden, golden_texts

HERE = Path(__file__).parent

BAD = sorted(path.stem for path in (HERE / "bad").glob("*.yml"))
OVERRIDES = {
    "override_without_equals": ["attention"],
    "override_without_key": ["=flash", "flash_block_sizes.=3"],
    "override_dashes": ["--attention=flash"],
    "override_open_bracket": ['flash_block_sizes={"block_q": 512'],
    "override_repeats_a_key": ["flash_block_sizes={block_q: 512, block_q: 256}"],
    "override_below_a_value": ["attention=flash", "hardware=gpu", "hardware.kind=h100"],
    "override_block_size_on_top": ["block_q=512"],
    "override_misspelt": ["atention=flash", "flash_block_sizes.blockq=512"],
    "override_wrong_type": ["deterministic=maybe", "profiler_steps=2.5"],
    "override_contradicts": ["attention=ring", "context_parallel=ulysses"],
    "override_of_a_foreign_section": ["training.steps=3"],
    "override_empty": ["attention="],
    "overrides_as_text": "attention=ring",
    "overrides_as_pairs": [("attention", "ring")],
    "overrides_with_an_object": {"attention": object},
}
SECTIONS = {
    "section_required_key_missing": ("model: {dim: 8}", []),
    "section_wrong_values": (
        "model:\n  dim: 0\n  nme: big\ntraining:\n  steps: 1.0e+3\n  schedule: cosin",
        [],
    ),
    "section_and_attention": ("attention: rng\nulysses_shards: 0\ntraining:\n  steps: none", []),
    "section_override_ambiguous": ("training: {steps: 3}", ["seed=1"]),
    "section_override_misspelt": (
        "training: {steps: 3}",
        ["training.step=1", "stepps=4", "patch=[1, 2]"],
    ),
    "section_override_wrong": ("training: {steps: 3}", ["steps=many", "learning_rate=fast"]),
    "section_not_finite": ("training: {steps: 3}", ["learning_rate=nan"]),
    "section_null": ("training:\n#  steps: 3", []),
}


@pytest.fixture(autouse=True)
def in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def check(name: str, load: Callable[[], object]) -> None:
    """Fail unless the error equals the golden one."""
    with pytest.raises(ConfigErrors) as caught:
        load()
    for problem in caught.value.problems:
        assert problem.setting and problem.rule and problem.remedy
    check_golden(f"config/{name}", str(caught.value))


@pytest.mark.parametrize("name", BAD)
def test_bad_file(name: str):
    check(name, lambda: AttentionConfig.from_yaml(f"bad/{name}.yml"))


@pytest.mark.parametrize("name", OVERRIDES)
def test_bad_override(name: str):
    check(name, lambda: AttentionConfig.from_overrides(OVERRIDES[name]))


@pytest.mark.parametrize("name", SECTIONS)
def test_bad_section(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text, overrides = SECTIONS[name]
    monkeypatch.chdir(tmp_path)
    Path("run.yml").write_text(text)
    check(name, lambda: Settings.from_yaml("run.yml", overrides))


MIXED = ["attention=rng", "mesh_axes=[data]"]
OTHERS: dict[str, Callable[[], object]] = {
    "file_missing": lambda: AttentionConfig.from_yaml("bad/kernel_mispelt.yml"),
    "folder_missing": lambda: AttentionConfig.from_yaml("baad/kernel.yml"),
    "file_none": lambda: AttentionConfig.from_yaml(None),  # type: ignore[arg-type]
    "file_without_name": lambda: AttentionConfig.from_yaml(""),
    "file_is_a_folder": lambda: AttentionConfig.from_yaml("../golden"),
    "file_and_override": lambda: AttentionConfig.from_yaml("bad/everything_at_once.yml", MIXED),
    "constructor": lambda: AttentionConfig(atention="flash", flash_block_sizes={"block_q": 0}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_errors(name: str):
    check(name, OTHERS[name])


def test_no_golden_file_is_left_over():
    assert set(golden_texts("config")) == {*BAD, *OVERRIDES, *SECTIONS, *OTHERS}


def test_an_override_mends_a_file():
    config = AttentionConfig.from_yaml("bad/kernel_misspelt.yml", ["attention=flash"])
    assert config.attention == "flash"
    with pytest.raises(ConfigErrors, match="path: None"):
        AttentionConfig.from_maxdiffusion(None)  # type: ignore[arg-type]
