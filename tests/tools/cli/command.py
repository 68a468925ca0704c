"""Run a command of maxattn as a user would, in this process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from maxattn.tools.cli import main


@dataclass(frozen=True)
class Ran:
    """The exit status of a command, and its output."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both streams and the status, for a golden file."""
        return f"{self.out}{self.err}exit status {self.status}"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> Ran:
    """Run `maxattn WORDS`."""
    status = main(words)
    out, err = capsys.readouterr()
    return Ran(status, out, err)
