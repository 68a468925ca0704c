"""What a command that measures prints on stderr: the device, and each measurement as it begins."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from maxattn.target import Target


def say(line: str) -> None:
    """Print a line on stderr at once."""
    print(line, file=sys.stderr, flush=True)


def say_where(what: str, target: Target) -> None:
    """Print what is measured on which device, and what to expect of a CPU."""
    slow = ": no accelerator is here, and long shapes take minutes to hours"
    say(f"measuring {what} on {target.device_kind}{slow if target.platform == 'cpu' else ''}")


class _ProgressLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"  {record.getMessage()}")  # the stderr of the moment


@contextmanager
def progress(name: str = "maxattn.tools.bench") -> Iterator[None]:
    """Print what a module logs of its progress, inside a `with`."""
    log, lines = logging.getLogger(name), _ProgressLines()
    before = log.level, log.propagate
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.setLevel(before[0])
        log.propagate = before[1]
