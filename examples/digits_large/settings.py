"""The settings of the model of several digits: Wan's, with clips that are made, not read.

`configs/digits_large.yml` gives a value and a reason for each key. The sizes of a clip are those
that `sampling` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import wan.settings
import yaml
from common.settings import Count, Whole

from maxattn.config import Section


class ClipData(Section):
    """The clips, made while the model learns."""

    source: Literal["digits"] = "digits"
    """What they show."""
    digit: Count = 16
    """Pixels along a side of a digit."""
    frames_seen: Whole = 0
    """Frames of a clip that a training step sees, drawn anew each time; 0: all of them."""
    folder: None = None
    """There is none: nothing is read."""


class Settings(wan.settings.Settings):
    """Wan's settings, with `data` that says how clips are made."""

    data: ClipData = ClipData()  # pyright: ignore[reportIncompatibleVariableOverride]
    """The clips."""


def describes_clips(path: str, overrides: Sequence[str]) -> bool:
    """Check whether a file with overrides has clips that are made: its data has a `source`."""
    if any(override.partition("=")[0].strip() == "data.source" for override in overrides):
        return True
    try:
        sections = yaml.safe_load(Path(path).read_text("utf-8-sig"))
        data = sections.get("data") if isinstance(sections, dict) else None
    # The class that reads the file reports its errors.
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(data, dict) and "source" in data
