"""Keeps measurements: each is written by a rename as soon as it is made, so a kill loses none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maxattn.tuned import VERSION, read

IDENTITY = ("device_kind", "versions", "kernel", "call", "sizes")


def find(path: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Return the measurement of the same sizes, call, device and versions, if there is one."""
    return next((m for m in read(path) if all(m[key] == wanted[key] for key in IDENTITY)), None)


def add(path: Path, measurement: dict[str, Any]) -> None:
    """Put a measurement into the file, in place of an earlier one of the same alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        kept = [m for m in read(path) if any(m[key] != measurement[key] for key in IDENTITY)]
        text = json.dumps({"version": VERSION, "measurements": [*kept, measurement]}, indent=1)
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time read and write."""
    import fcntl

    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
