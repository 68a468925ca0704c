"""Bound the work of a call by counting lines, because times vary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).parents[1] / "maxattn")


def lines_run(call: Callable[[], Any], most: int) -> int:
    """Count the lines of maxattn that a call executes, with repetitions in loops.

    Fails as soon as there are more than `most`.
    """
    lines = count(1)

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            assert next(lines) <= most, f"over {most} lines, in {frame.f_code.co_filename}"
        return line

    def entered(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return next(lines) - 1
