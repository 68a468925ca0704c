"""Keep measurements in a file. Each is written at once, by a rename, so a kill loses none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from maxattn.config.measurements import VERSION, is_same, read_kept
from maxattn.tools.writable import unwritable, write_whole
from maxattn.tuned import VARIABLE, cache_path
from maxattn.weights.replacing import locked, replacing


def find(path: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Return the kept measurement with the same call, device, versions and sizes or settings."""
    return next((m for m in read_kept(path).measurements if is_same(m, wanted)), None)


def add(path: Path, measurement: dict[str, Any]) -> None:
    """Write a measurement to the file; replace an earlier measurement of the same call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        kept = [m for m in read_kept(path).measurements if not is_same(m, measurement)]
        text = json.dumps({"version": VERSION, "measurements": [*kept, measurement]}, indent=1)
        write_whole(path, text)


class Opened(NamedTuple):
    """The file of measurements; if it cannot be written, a temporary copy and the reason."""

    path: Path
    problem: str

    def say(self, what: str) -> None:
        """Print what is measured, and where times are kept."""
        where = "" if self.problem else f"; measurements in {self.path}"
        print(f"  {what}{where}", flush=True)


@contextmanager
def opened() -> Iterator[Opened]:
    """Open the file of measurements; print if it cannot be written, and if it is damaged."""
    path = cache_path()
    problem = unwritable(VARIABLE, path)
    with TemporaryDirectory(prefix="maxattn-tune-") as folder:
        copy = Path(folder) / path.name if problem else path
        if problem:
            why = f"{path} cannot be written, so nothing is kept: {problem.rule}"
            print(f"{why}; set {VARIABLE} to a folder that you may write to")
            with suppress(OSError):  # no file, or no permission
                shutil.copyfile(path, copy)
        if aside := put_aside(copy):
            beside = "" if problem else f"; a copy is kept as {aside[1].name}"
            print(f"{path} is damaged: {aside[0]}{beside}")
        yield Opened(copy, problem.rule if problem else "")


def put_aside(path: Path) -> tuple[str, Path] | None:
    """Copy a damaged file; return the damage and the copy's path, None for an intact file."""
    damage = read_kept(path).damage
    if not damage:
        return None
    path = path.resolve()  # a link stays, and the copy is beside its file
    with locked(path.parent):
        try:
            beside = _free_name(path)
            with replacing(beside) as whole:
                shutil.copyfile(path, whole)
        except OSError:  # it cannot be read
            beside = path.with_name(f"{path.stem}.unreadable-{os.getpid()}{path.suffix}")
            path.replace(beside)
            write_whole(path, json.dumps({"version": VERSION, "measurements": []}))
    return damage, beside


def _free_name(path: Path) -> Path:
    """Return the path of an equal copy of a file, or of a new copy, so that none is overwritten."""
    for number in count(1):
        beside = path.with_suffix(f".damaged{f'-{number}' if number > 1 else ''}.json")
        if not beside.exists() or beside.read_bytes() == path.read_bytes():
            return beside
    raise AssertionError("unreachable")
