"""Whether a path can be written to: asked before the work whose result goes there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from maxattn.errors import ConfigError


def unwritable(setting: str, path: str | Path, folder: bool = False) -> ConfigError | None:
    """Return why a file or folder cannot be written, or None. Nothing is left behind.

    Args:
        setting: that named the path.
        path: of the file or folder; it and the folders above it need not exist.
        folder: whether files go into it.
    """
    path = Path(path)
    try:
        return _problem(setting, path, folder)
    # A folder above that cannot be read, a name that is too long, a NUL in the name.
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        return _refused(setting, path, f"the system refuses it: {why}")


def check_writable(setting: str, path: str | Path, folder: bool = False) -> None:
    """Refuse a path that cannot be written to.

    Raises:
        ConfigError: saying why.
    """
    if (problem := unwritable(setting, path, folder)) is not None:
        raise problem


def _problem(setting: str, path: Path, folder: bool) -> ConfigError | None:
    if path.is_symlink() and not path.exists():
        return _refused(setting, path, "it is a link to what is not there")
    if path.exists() and path.is_dir() != folder:
        rule = "it is a folder, and there is a file of that name"
        rule = rule if folder else "it is a file, and this is a folder"
        return ConfigError(setting, path, rule, "name another")
    if path.exists() and not folder:
        writable = os.access(path, os.W_OK)
        return None if writable else _refused(setting, path, "it may not be written")
    return _folder_problem(setting, path)


def _folder_problem(setting: str, path: Path) -> ConfigError | None:
    there = next(above for above in (path, *path.parents) if above.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".maxattn-", dir=there))
    except OSError as error:
        rule = f"in {there} nothing can be written: {error.strerror}"
        return _refused(setting, path, rule)
    return None


def _refused(setting: str, path: Path, rule: str) -> ConfigError:
    return ConfigError(setting, path, rule, "name a place that you may write to")
