"""Files that take their names when they are whole, and one writer of a folder at a time.

Locks end with their process. Unfinished files that no process locks are what a kill left.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from maxattn.errors import InputError

log = logging.getLogger("maxattn")
PARTIAL = ".partial"


def own_ending() -> str:
    """Return an ending for unfinished files that no other writer uses: ".PID-RANDOM.partial"."""
    return f".{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path with the same ending to write to; rename it to `path` when the block ends.

    If the block raises, what it wrote is deleted. What killed writers of `path` left is deleted
    first. If `path` is a link, the file that it points to is replaced.

    Raises:
        InputError: the system does not write the file, for example since the disk is full.

    >>> with replacing(Path(tempfile.mkdtemp()) / "notes.txt") as unfinished:
    ...     _ = unfinished.write_text("whole")
    """
    try:
        target = path.resolve() if path.is_symlink() else path
        _remove_leftovers(target)
        with _own_folder(target) as folder:
            yield folder / target.name
            (folder / target.name).replace(target)
    except Exception as error:
        at = Path(str(getattr(error, "filename", None) or path.parent))
        is_of_files = isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
        if not is_of_files or (at != path.parent and PARTIAL not in str(at)):  # another file
            raise
        reason = getattr(error, "strerror", None) or error
        rule = f"it must be written whole, and the system reports: {reason}"
        remedy = (
            "name a path with write permission and enough space; the earlier file, if any, is"
            " unchanged"
        )
        raise InputError("file", path, rule, remedy) from error


@contextmanager
def _own_folder(target: Path) -> Iterator[Path]:
    with ExitStack() as held:
        while True:
            folder = target.with_name(f"{target.name}{own_ending()}")
            folder.mkdir()
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            with suppress(FileNotFoundError):  # another writer removed it before it was locked
                held.enter_context(locked(folder, wait=False))
            if folder.is_dir():
                break
        yield folder


def _remove_leftovers(target: Path) -> None:
    unfinished = re.compile(rf"{re.escape(target.name)}\.\d+-[0-9a-f]+{re.escape(PARTIAL)}")
    for folder in target.parent.iterdir():
        if unfinished.fullmatch(folder.name) and folder.is_dir():
            with suppress(FileNotFoundError), locked(folder, wait=False) as is_ours:
                if is_ours:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[bool | None]:
    """Lock a folder, without a file; yield True, False if another has the lock, None without locks.

    A system or file system without locks is warned of once.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        _warn_of_no_locks()
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_ours: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            is_ours = False
        except OSError:
            is_ours = None
            _warn_of_no_locks()
        yield is_ours
    finally:
        os.close(descriptor)


@cache
def _warn_of_no_locks() -> None:
    log.warning(
        "files: this system or file system has no locks (flock): let one process at a time save"
        " into a folder, and delete what a kill leaves (*%s)",
        PARTIAL,
    )
