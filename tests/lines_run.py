"""The work of a call, counted: what must not be slow is bounded by this, never by seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).parents[1] / "maxattn")


def lines_run(call: Callable[[], Any], most: int) -> int:
    """Count the lines of maxattn that a call runs, loops as often as they go round.

    It fails as soon as there are more than `most`.
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
