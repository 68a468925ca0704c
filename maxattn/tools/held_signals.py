"""Ctrl-C and TERM, held back while a child process is started.

A child that runs before its parent can name it would be left behind by a signal in between.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HELD = signal.SIGINT, signal.SIGTERM


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold signals back until the block ends, and then let the first one act.

    Only the main thread gets signals: in others there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in HELD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
