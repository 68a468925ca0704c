"""The settings of the model of several digits: Wan's, with clips that are made, not read.

`configs/digits_large.yml` gives a value and a reason for each key. The sizes of a clip are those
that `sampling` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import yaml
from annotated_types import Ge

from maxattn.config import Section
from maxattn_examples.common.settings import Count, Whole
from maxattn_examples.wan import settings as wan_settings


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


class Distil(Section):
    """A student of few steps, which learns from the model of `model.folder`."""

    substeps: Count = 4
    """Euler steps of the teacher in one of the student's, which are those of `sampling`."""
    guidance_scale: Annotated[float, Ge(0)] = 2.5
    """Of the teacher; the student needs none."""


class ClipTraining(wan_settings.TrainingSettings):
    """Training on clips, or by a teacher."""

    distil: Distil | None = None
    """Learn few steps from a teacher; null: learn from the clips."""


class Settings(wan_settings.Settings):
    """Wan's settings, with `data` that says how clips are made."""

    data: ClipData = ClipData()  # pyright: ignore[reportIncompatibleVariableOverride]
    """The clips."""
    training: ClipTraining = ClipTraining()  # pyright: ignore[reportIncompatibleVariableOverride]
    """How the model learns."""


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
