"""Commands of pages that tests cannot run have valid options, and make targets exist.

They need hardware, weights or minutes. `--help` shows only the options of its family.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Iterator

import pytest

from maxattn.tools.cli import main
from tests.pages import blocks, pages

from .conftest import ROOT

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
ELSEWHERE = ("pip", "export", "git")  # what no file here defines
PARSERS = ("parse_args", "parse_intermixed_args", "parse_known_intermixed_args")


class Parsed(Exception):
    """Raised after a command line is parsed, to stop the command."""


def unrun() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each command that no test runs."""
    for page in pages():
        for block in blocks(page):
            if block.language == "sh" and block.mark.startswith("needs"):
                lines = block.text.replace("\\\n", "").splitlines()
                yield from ((block.where, line) for line in lines if line.strip())


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a command, and stop it after its arguments are parsed."""
    program, *rest = words
    if program == "maxattn":
        main(rest)
    elif rest[0] == "-m":
        assert rest[1] == "pytest" or (ROOT / rest[1].replace(".", "/")).with_suffix(".py").exists()
        assert all((ROOT / word).exists() for word in rest[2:] if word.endswith(".py"))
        raise Parsed
    else:
        monkeypatch.setattr(sys, "argv", rest)
        runpy.run_path(str(ROOT / rest[0]), run_name="__main__")


@pytest.mark.parametrize(("where", "command"), list(unrun()), ids=lambda text: text.split()[0])
def test_an_unrun_command_is_one(where: str, command: str, monkeypatch, capsys) -> None:
    words = shlex.split(command, comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    if words[0] == "make":
        assert words[1] in TARGETS, f"{where}: make has no target {words[1]}"
        return
    if words[0] in ELSEWHERE:
        return
    for name in PARSERS:
        real = getattr(argparse.ArgumentParser, name)

        def stop(self, *given, real=real, **named):
            found = real(self, *given, **named)
            assert not (isinstance(found, tuple) and found[1]), f"{where}: {found[1]}"
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, stop)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    try:
        parse(words, monkeypatch)
    except Parsed:
        return
    except SystemExit:
        pytest.fail(f"{where}: {command}\n{capsys.readouterr().err}")
    pytest.fail(f"{where}: {command} reads no command line")


# ---- help ----------------------------------------------------------------------------------------


FOREIGN = {
    "flux": ("wan", "sdxl", "--frames", "--image ", "--lora-2", "video"),
    "sdxl": ("wan", "flux", "--frames", "--image ", "--lora-2", "video"),
    "wan": ("sdxl", "flux"),
}
OWN = {"flux": "flux.yml", "sdxl": "sdxl.yml", "wan": "wan_1_3b.yml"}


@pytest.mark.parametrize("family", FOREIGN)
@pytest.mark.parametrize("verb", ["train", "generate"])
def test_help_is_of_its_own_family(verb: str, family: str, monkeypatch, capsys) -> None:
    script = ROOT / "examples" / f"{verb}.py"
    monkeypatch.setattr(sys, "argv", [script.name, family, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and f"such as configs/{OWN[family]}" in said
    assert not [word for word in FOREIGN[family] if word.lower() in said.lower()], said
    if verb == "generate":
        assert ("--frames" in said) == (family == "wan")
