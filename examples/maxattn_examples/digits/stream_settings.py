"""The settings of digits that are streamed, on top of those of every rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from maxattn.errors import ConfigError
from maxattn_examples.common.settings import Count, RolloutSettings, Whole


class StreamSettings(RolloutSettings):
    """Streaming of digits, and the demonstrations after training."""

    blocks: Count = 18
    """Blocks of each prompt's videos."""
    long_blocks: Whole = 100
    """Blocks of the long videos; 0 makes none."""
    switch_block: Whole = 6
    """Block before which some videos get another prompt; 0 makes none."""
    contrast_steps: Whole = 0
    """Training steps of a model whose frames all see each other, for contrast; 0 trains none."""


def contradictions(values: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Refuse streams that the model or the data cannot follow.

    Args:
        values: all sections, each valid by itself.
    """
    said, data, training = (values[name] for name in ("rollout", "data", "training"))
    if said is None:  # or wrong by itself; `without_rollout` is asked once all is right
        return
    yield from _unfit(said, values["model"].patch[0])
    if not data.torus:
        rule = f"streamed digits move on for ever, and here they stop after {data.frames} frames"
        yield ConfigError("data.torus", False, rule, "set it to true, or remove rollout")
    if data.frames % said.frames_per_block:
        rule = f"a clip is whole blocks of {said.frames_per_block} frames"
        near = max(data.frames // said.frames_per_block, 1) * said.frames_per_block
        yield ConfigError("data.frames", data.frames, rule, f"use {near}")
    yield from _of_sinks(said, training)
    yield from _of_switches(said, training, data.frames)


def without_rollout(training: Any) -> Iterator[ConfigError]:
    """Refuse forcing, which is by blocks, where there are none; `training` is the section."""
    if training.forcing != "none":
        rule = "each block has a time, and rollout sets the frames of a block"
        yield ConfigError("training.forcing", training.forcing, rule, "write rollout, or none")
    if training.sink_distance:
        rule = "it is the distance of sinks, and there is no rollout"
        yield ConfigError("training.sink_distance", training.sink_distance, rule, "remove it")
    if training.prompt_switches:
        rule = "a prompt changes between blocks, and there is no rollout"
        yield ConfigError("training.prompt_switches", training.prompt_switches, rule, "remove it")


def _unfit(said: StreamSettings, patch: int) -> Iterator[ConfigError]:
    """Refuse settings that the digits' model does not have."""
    if patch != 1:
        rule = "the frames of a stream are patches of one frame"
        yield ConfigError("model.patch", f"{patch} frames", rule, "use 1 for the first number")
    if said.first_frame_alone:
        rule = "the model numbers the frames of a block, and all blocks are alike"
        yield ConfigError("rollout.first_frame_alone", True, rule, "remove it")
    if said.positions != "absolute":
        rule = "the digits' model is trained with the positions of frames"
        yield ConfigError("rollout.positions", said.positions, rule, "write absolute")


def _of_sinks(said: StreamSettings, training: Any) -> Iterator[ConfigError]:
    """Refuse distances of sinks that are none, or no whole blocks."""
    if not training.sink_distance:
        return
    if training.forcing == "none" or not said.sink:
        rule = "it is the distance of sinks, which training by forcing with a sink has"
        remedy = "set rollout.sink and training.forcing, or remove it"
        yield ConfigError("training.sink_distance", training.sink_distance, rule, remedy)
    elif said.sink % said.frames_per_block:
        rule = f"with training.sink_distance a sink is whole blocks of {said.frames_per_block}"
        yield ConfigError("rollout.sink", said.sink, rule, f"use {said.frames_per_block}")


def _of_switches(said: StreamSettings, training: Any, frames: int) -> Iterator[ConfigError]:
    """Refuse changes of prompt that no clean clip shows."""
    if not (share := training.prompt_switches):
        return
    if training.forcing != "teacher":
        rule = f"clean clips show what was before, and with forcing: {training.forcing} are none"
        remedy = "set it to 0, or training.forcing: teacher"
        yield ConfigError("training.prompt_switches", share, rule, remedy)
    elif frames <= said.frames_per_block:
        rule, remedy = "a prompt changes between blocks, and a clip is one", "raise data.frames"
        yield ConfigError("training.prompt_switches", share, rule, remedy)
