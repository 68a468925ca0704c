"""Files that take their names when they are whole, and one writer of a folder at a time."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"


def own_ending() -> str:
    """Return an ending for unfinished files that no other writer uses: ".PID-RANDOM.partial"."""
    return f".{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; rename that file to `path` when the block ends.

    If the block raises, the unfinished file is deleted. If `path` is a link, the file that it
    points to is replaced.
    """
    target = path.resolve() if path.is_symlink() else path
    beside = target.with_name(f"{target.name}{own_ending()}")
    try:
        yield beside
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Wait until no other process saves into a folder, and keep others waiting.

    The lock ends with the process, and leaves no file. File systems without locks have none.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
