"""The scripts of `maxattn completion`, run by the installed shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from maxattn.target import Target
from maxattn.tools.cli.completion import TARGETS, script
from maxattn.tools.cli.config import keys
from tests.tools.cli.command import run

ASKED = {
    "maxattn ex": {"explain"},
    "maxattn explain --sh": {"--shape"},
    "maxattn explain attention=auto --shape sdxl-32": {"sdxl-32", "sdxl-32-cross"},
    "maxattn check ici_cont": {"ici_context_parallelism="},
    "maxattn check ring_direction=b": {"ring_direction=both_ways"},
    "maxattn config ulysses_s": {"ulysses_shards"},
    "maxattn explain --role ": {"self", "cross"},
    "maxattn explain --target H2": {"H200"},
}
BASH = """
COMP_LINE=$1; COMP_POINT=${#1}; _maxattn 2>/dev/null; printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -l -- ${(M)@:#${PREFIX}*} }
_files() { : }
words=("${(@s: :)1}"); CURRENT=$#words; PREFIX=$words[-1]; _maxattn
"""


@pytest.mark.parametrize("line", ASKED)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes(shell: str, line: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file, folder = tmp_path / "maxattn", tmp_path / "empty"
    folder.mkdir()
    if shell == "fish":
        file.write_text(f'{script(shell)}complete -C "{line}"\n', encoding="utf-8")
        command = ["fish", "--no-config", str(file)]
    else:
        first, last = ("", BASH) if shell == "bash" else ("compdef() { : }\n", ZSH)
        file.write_text(first + script(shell) + last, encoding="utf-8")
        command = [shell, *(["--norc"] if shell == "bash" else ["-f"]), str(file), line]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    cut = line.rpartition(" ")[2].rpartition("=") if shell == "bash" else ("", "", "")
    assert {"".join(cut[:2]) + word for word in ran.stdout.split()} == ASKED[line], ran.stderr


def test_targets_and_keys_are_those_that_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(Target.named(name) for name in TARGETS)
    out = run(capsys, "completion", "bash").out
    assert all(key in out for key in keys())
    assert run(capsys, "completion", "tcsh").status == 2
