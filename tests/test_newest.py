"""The Python that `make test-newest` chooses, and its message if there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import newest


def python(folder: Path, name: str, says: str) -> Path:
    """Write a program that answers as a Python of some version does."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return path


def test_the_newest_comes_first_and_one_of_each_minor_version(tmp_path: Path) -> None:
    says = {"a": "echo 3 13 0", "b": "echo 3 12 9", "c": "echo 3 13 10", "old": "echo 3 11 7",
            "broken": "exit 1", "strange": "echo hello"}  # fmt: skip
    made = {name: python(tmp_path, name, text) for name, text in says.items()}
    assert newest.newer(made.values(), (3, 11)) == [made["c"], made["b"]]
    assert newest.newer(made.values(), (3, 13)) == []


def test_pythons_of_the_path_and_of_pyenv_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "versions" / "3.13.1" / "bin"
    kept.mkdir(parents=True)
    both = [python(tmp_path, "python3.12", "echo"), python(kept, "python", "echo")]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert newest.found() == both


def test_without_a_newer_python_nothing_runs_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MAXATTN_NEWEST_PYTHON", raising=False)
    monkeypatch.setattr(newest, "found", lambda: [])
    assert newest.main() == 0
    said = capsys.readouterr().out
    assert "none newer than" in said and "skipped" in said


def test_every_file_is_there() -> None:
    assert all((newest.ROOT / "tests" / file).is_file() for file in newest.FILES)
