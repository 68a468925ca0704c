"""`--help` of each command shows its own family's files and options."""

from __future__ import annotations

import runpy
import sys

import pytest

from .conftest import ROOT

FOREIGN = {
    "flux": ("wan", "sdxl", "--frames", "--image ", "--lora-2", "video"),
    "sdxl": ("wan", "flux", "--frames", "--image ", "--lora-2", "video"),
    "wan": ("sdxl", "flux"),
}
OWN = {"flux": "flux.yml", "sdxl": "sdxl.yml", "wan": "wan_1_3b.yml"}


@pytest.mark.parametrize("family", FOREIGN)
@pytest.mark.parametrize("verb", ["train", "generate"])
def test_help_is_of_its_own_family(
    verb: str, family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "examples" / f"{verb}_{family}.py"
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and f"such as configs/{OWN[family]}" in said
    assert not [word for word in FOREIGN[family] if word.lower() in said.lower()], said
    if verb == "generate":
        assert ("--frames" in said) == (family == "wan")
