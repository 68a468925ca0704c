"""Progress of measurements on stderr: the device, and each measurement when it begins."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from maxattn.target import Target

BAR, CLEAR = 24, "\r\x1b[2K"  # width of the bar; the code that clears a terminal's line


def say(line: str) -> None:
    """Print a line on stderr at once."""
    print(line, file=sys.stderr, flush=True)


def _on_terminal(text: str) -> None:
    """Print text with codes for a terminal; log records in it are escaped."""
    print(text, end="", file=getattr(sys.stderr, "stream", sys.stderr), flush=True)


def say_where(what: str, target: Target) -> None:
    """Print what is measured on which device; on a CPU, warn of long times."""
    slow = ": no accelerator is here, and long shapes take minutes to hours"
    say(f"measuring {what} on {target.device_kind}{slow if target.platform == 'cpu' else ''}")


class _ProgressLines(logging.Handler):
    """Print each log record on a line; on a terminal, after a progress bar if there are steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.done, self.steps = 0, steps if sys.stderr.isatty() else 0

    def emit(self, record: logging.LogRecord) -> None:
        if not self.steps:
            say(f"  {record.getMessage()}")
            return
        self.done = min(self.done + 1, self.steps)
        filled = BAR * self.done // self.steps
        line = f"  {'█' * filled}{'·' * (BAR - filled)} {record.getMessage()}"
        _on_terminal(f"{CLEAR}{line}")


@contextmanager
def progress(steps: int = 0) -> Iterator[None]:
    """Print log records of measurements and compiles; on a terminal, after a bar of `steps`."""
    log, lines = logging.getLogger("maxattn.measuring"), _ProgressLines(steps)
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
        if lines.steps:
            _on_terminal(CLEAR)
