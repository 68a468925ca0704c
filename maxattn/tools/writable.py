"""Check that a file or folder can be written, before the work whose result it will hold."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from maxattn.errors import ConfigError
from maxattn.weights.replacing import replacing


def unwritable(setting: str, path: str | Path, folder: bool = False) -> ConfigError | None:
    """Return the error if a setting's path cannot be written, else None; no test file is left."""
    try:
        return _problem(setting, Path(path), folder)
    # A folder that cannot be read, a name that is too long, or a NUL in it.
    except (OSError, ValueError) as error:
        why = f"the system reports: {getattr(error, 'strerror', None) or error}"
        return ConfigError(setting, Path(path), why, "name a path that you may write to")


def check_writable(setting: str, path: str | Path, folder: bool = False) -> None:
    """Refuse a file or folder that cannot be written."""
    if (problem := unwritable(setting, path, folder)) is not None:
        raise problem


def write_whole(path: Path, text: str) -> None:
    """Write a text file by a rename, so that a killed process leaves the earlier file intact."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def _problem(setting: str, path: Path, folder: bool) -> ConfigError | None:
    rule = ""
    if path.exists() and path.is_dir() != folder:
        file, other = "it must be a file, and this is a folder", "a file has that name"
        rule = f"it must be a folder, and {other}" if folder else file
        return ConfigError(setting, path, rule, "name another path")
    if path.is_symlink() and not path.exists():
        rule = "it is a link whose target does not exist"
    elif path.exists() and not folder:
        rule = "" if os.access(path, os.W_OK) else "you may not write to it"
    else:  # try to make a folder in the nearest existing folder
        there = next(above for above in (path, *path.parents) if above.exists())
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".maxattn-", dir=there))
        except OSError as error:
            rule = f"nothing can be written in {there}: {error.strerror}"
    return ConfigError(setting, path, rule, "name a path that you may write to") if rule else None
