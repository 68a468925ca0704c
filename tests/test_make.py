"""The parts of the Makefile that are written in Python: which tests `make check` runs, and which
Python `make test-newest` takes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import newest
from tests.changed import mirror_of


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


def test_without_a_newer_python_nothing_runs_and_that_is_said(monkeypatch, capsys) -> None:
    monkeypatch.delenv("MAXATTN_NEWEST_PYTHON", raising=False)
    monkeypatch.setattr(newest, "found", lambda: [])
    assert newest.main() == 0
    said = capsys.readouterr().out
    assert "none newer than" in said and "skipped" in said


def test_every_file_is_there() -> None:
    assert all((newest.ROOT / "tests" / file).is_file() for file in newest.FILES)


@pytest.mark.parametrize(
    ("file", "tests"),
    {
        "maxattn/masks/blocks.py": {"tests/masks"},
        "maxattn/tools/cli/__init__.py": {"tests/tools/cli"},
        "maxattn/jax_private/__init__.py": set(),
        "maxattn/_remat.py": {"tests/test_remat.py"},
        "examples/maxattn_examples/wan/model.py": {"tests/examples/wan"},
        "tests/masks/definitions.py": {"tests/masks"},
        "tests/masks/test_blocks.py": {"tests/masks/test_blocks.py"},
        "tests/masks/test_that_is_deleted.py": set(),
        "configs/wan_14b.yml": {"tests/config"},
        "docs/results.md": {"tests/test_pages.py", "tests/test_site.py"},
        "CHANGELOG.md": {"tests/test_pages.py"},
        "maxattn/masks/README.md": {"tests/test_pages.py"},
        "LICENSE": set(),
    }.items(),
)
def test_the_mirror_of_a_file(file: str, tests: set[str]) -> None:
    assert set(mirror_of(file)) == tests
