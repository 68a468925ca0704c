"""The family of a command: named before the file, or derived from the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import stream
from maxattn_examples import families

from maxattn.errors import ConfigError

from .conftest import ROOT

OTHERS = {"sdxl": "sdxl", "flux": "flux"}
FILES = sorted(
    x for x in (ROOT / "configs").glob("*.yml") if x.stem not in ("attention", "wan_tiny")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_says_its_family(path: Path) -> None:
    assert families.of_file(str(path), ["model.sizes=null"]) == OTHERS.get(path.stem, "wan")


def test_an_override_names_sizes_of_another_family() -> None:
    assert families.of_file(str(ROOT / "configs/flux.yml"), ["sizes=wan-2.1-t2v-14b"]) == "wan"


def test_a_family_is_taken_off_the_words_alone() -> None:
    assert families.named(["flux", "wan.yml", "--plan"]) == ("flux", ["wan.yml", "--plan"])
    assert families.named(["wan.yml", "flux"]) == (None, ["wan.yml", "flux"])


def test_a_file_of_no_family_and_a_family_without_streams_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yml").write_text("model: {folder: here}")
    with pytest.raises(ConfigError, match=r"x.yml\n.*\n.*write wan or sdxl or flux before"):
        families.of_file(str(tmp_path / "x.yml"))
    with pytest.raises(ConfigError, match=r"FAMILY: flux\n.*\n.*write wan"):
        stream.arguments_of(["flux", "x.yml", "--latents", "out"])
