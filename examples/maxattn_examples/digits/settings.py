"""The settings of digits: Wan's, with clips that are rendered during training.

`configs/digits_large.yml` and `configs/wan_tiny_stream.yml` give a value and a reason for each key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge

from maxattn.config import Section
from maxattn.errors import ConfigError
from maxattn_examples.common.settings import Count, RolloutSettings, Share, Whole
from maxattn_examples.wan import settings as wan_settings


class ClipData(Section):
    """The clips, rendered during training."""

    source: Literal["digits", "torus"] = "digits"
    """Several coloured digits that cross, leave and come back; or one that moves for ever."""
    digit: Count = 16
    """Of digits: pixels along a side of one."""
    frames_seen: Whole = 0
    """Of digits: frames of a clip that a training step sees, drawn anew each time; 0: all."""
    frames: Annotated[int, Ge(2)] = 12
    """Of a torus: frames of a clip."""
    canvas: Annotated[int, Ge(12)] = 12
    """Of a torus: pixels along a side."""
    speed: Count = 2
    """Of a torus: pixels that the digit moves in a frame."""
    start_every: Count = 6
    """Of a torus: pixels between the places along its path where a digit may be in frame 0."""
    folder: None = None
    """There is none: nothing is read."""


class Distil(Section):
    """A student of few steps, which learns from the model of `model.folder`."""

    substeps: Count = 4
    """Euler steps of the teacher in one of the student's, which are those of `sampling`."""
    guidance_scale: Annotated[float, Ge(0)] = 2.5
    """Of the teacher; the student needs none."""


class ClipTraining(wan_settings.TrainingSettings):
    """Training on clips, or with a teacher."""

    distil: Distil | None = None
    """Learn few steps from a teacher; null: learn from the clips."""
    prompt_switches: Share = 0.0
    """With teacher forcing: share of clips whose first clean blocks show another digit."""
    sink_distance: Whole = 0
    """Furthest, in frames, that a sink is taught to be seen from; 0: as far as a clip reaches."""


class ClipSampling(wan_settings.SamplingSettings):
    """Sampling of clips, and of the videos that are streamed after training with forcing."""

    per_prompt: Whole = 1  # pyright: ignore[reportIncompatibleVariableOverride]
    """Samples of each prompt; of a torus, 0 streams and judges nothing after training."""


class ClipRollout(RolloutSettings):
    """Streaming, with the videos that are streamed after training."""

    blocks: Count = 18
    """Blocks of each prompt's videos."""
    long_blocks: Whole = 100
    """Blocks of the long videos; 0 makes none."""
    switch_block: Whole = 6
    """Block before which some videos get another prompt; 0 makes none."""


class Settings(wan_settings.Settings):
    """Wan's settings, with `data` for rendered clips."""

    data: ClipData = ClipData()  # pyright: ignore[reportIncompatibleVariableOverride]
    """The clips."""
    training: ClipTraining = ClipTraining()  # pyright: ignore[reportIncompatibleVariableOverride]
    """How the model learns."""
    sampling: ClipSampling = ClipSampling()  # pyright: ignore[reportIncompatibleVariableOverride]
    """How clips are drawn."""
    rollout: ClipRollout = ClipRollout()  # pyright: ignore[reportIncompatibleVariableOverride]
    """How a video is made block by block."""

    @property
    def on_torus(self) -> bool:
        """Whether clips show one digit that moves for ever."""
        return self.data.source == "torus"

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse forcing on clips that do not support it, and sinks longer than a clip."""
        yield from super().contradictions(values)
        data, training, rollout = (values[name] for name in ("data", "training", "rollout"))
        size, forced = rollout.frames_per_block, training.forcing
        if data.source == "digits" and forced != "none":
            rule = "these clips are for training without forcing"
            yield ConfigError("training.forcing", forced, rule, "use none, or data.source: torus")
        if data.source == "torus" and data.canvas % 6:
            rule = "a token is 6 x 6 pixels"
            yield ConfigError("data.canvas", data.canvas, rule, "use 12, 18 or 24")
        if (far := training.sink_distance) and (forced == "none" or not rollout.sink):
            rule = "it needs training by forcing with a sink"
            remedy = "set rollout.sink and training.forcing, or remove it"
            yield ConfigError("training.sink_distance", far, rule, remedy)
        if far and rollout.sink % size:
            rule = f"with training.sink_distance the sink must be whole blocks of {size}"
            yield ConfigError("rollout.sink", rollout.sink, rule, f"use {size}")
        if (share := training.prompt_switches) and (forced != "teacher" or data.frames <= size):
            rule = "a change of prompt needs clean clips of several blocks"
            remedy = "set it to 0, or training.forcing: teacher with clips of several blocks"
            yield ConfigError("training.prompt_switches", share, rule, remedy)


def describes_clips(path: str, overrides: Sequence[str]) -> bool:
    """Check whether a file or its overrides set `data.source`, so that clips are rendered."""
    if any(override.partition("=")[0].strip() == "data.source" for override in overrides):
        return True
    try:
        sections = yaml.safe_load(Path(path).read_text("utf-8-sig"))
        data = sections.get("data") if isinstance(sections, dict) else None
    # The class that reads the file reports its errors.
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(data, dict) and "source" in data
