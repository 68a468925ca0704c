"""Checkpoints of an earlier run: set aside until the run that starts again has one of its own.

At every moment one of two folders holds whole checkpoints: `checkpoints`, or the one beside it.
"""

from __future__ import annotations

import shutil
from pathlib import Path


def steps_in(folder: Path) -> list[int]:
    """List the steps of the whole checkpoints in a folder, which may not be there."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdigit())


def beside(folder: Path) -> Path:
    """Return where the checkpoints of a folder are set aside."""
    return folder.with_name(f"{folder.name}.earlier")


def is_there(folder: Path) -> bool:
    """Check whether a run has left a folder of checkpoints, set aside or not."""
    return folder.is_dir() or beside(folder).is_dir()


def set_aside(folder: Path) -> None:
    """Rename a folder of checkpoints, so that another run can write its own there."""
    if folder.exists():
        folder.rename(beside(folder))


def forget(folder: Path) -> None:
    """Delete the checkpoints that were set aside."""
    shutil.rmtree(beside(folder), ignore_errors=True)


def bring_back(folder: Path) -> None:
    """Put back what a run set aside that ended before its own first checkpoint was whole."""
    if not beside(folder).is_dir():
        return
    if not steps_in(folder):
        shutil.rmtree(folder, ignore_errors=True)
        beside(folder).rename(folder)
    forget(folder)
