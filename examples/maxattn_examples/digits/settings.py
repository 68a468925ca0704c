"""The settings of the digits' model: those of attention, and five sections of its own.

A YAML file holds both; `configs/wan_tiny.yml` and `configs/wan_tiny_stream.yml` give a value and a
reason for each key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from annotated_types import Ge, Lt

import maxattn as ma
from maxattn.config import Section
from maxattn.errors import ConfigError
from maxattn_examples.common.settings import Count, NotNegative, Positive, Share, Whole
from maxattn_examples.train.settings import MOST, How
from maxattn_examples.train.settings import context_errors as of_forcing

from . import stream_settings, words
from .stream_settings import StreamSettings


class ModelSettings(Section):
    """The sizes of the transformer."""

    dim: Count = 96
    """Width of a token."""
    layers: Count = 4
    """Blocks."""
    heads: Count = 4
    """Attention heads of a block."""
    dim_head: Annotated[int, Ge(6)] = 24
    """Channels of a head; even, since RoPE turns pairs."""
    ffn_dim: Count = 384
    """Width inside the feed-forward layer."""
    patch: tuple[Count, Count, Count] = (1, 6, 6)
    """Frames, rows and columns in a patch."""
    time_dim: Annotated[int, Ge(2)] = 64
    """Cosines and sines of the time; even."""
    rope_theta: Positive = 1e4
    """Base of RoPE's frequencies."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse odd sizes of what comes in pairs."""
        for key in ("dim_head", "time_dim"):
            if values[key] % 2:
                rule, remedy = "it is even: channels are rotated in pairs", f"use {values[key] + 1}"
                yield ConfigError(key, values[key], rule, remedy)


class DataSettings(Section):
    """The videos of moving digits."""

    frames: Annotated[int, Ge(2)] = 5
    """Frames of a video."""
    canvas: Annotated[int, Ge(words.SIDE)] = 12
    """Pixels along a side of a frame."""
    lane_spread: Whole = 2
    """Furthest that a digit's path lies from the middle, in pixels."""
    torus: bool = False
    """Join opposite edges, so that a digit moves on for ever."""
    speed: Count = 1
    """Pixels that a digit moves in a frame; more than 1 on a torus alone."""
    start_every: Count = 1
    """On a torus, pixels between the places along its path where a digit may be in frame 0."""
    held_out: tuple[str, ...] = ()
    """Prompts never trained on."""

    @property
    def lanes(self) -> range:
        """Pixels between the edge and the digit, across its movement."""
        middle = (self.canvas - words.SIDE) // 2
        return range(middle - self.lane_spread, middle + self.lane_spread + 1)

    @property
    def ends(self) -> range:
        """Pixels left between the edge it moves to and the digit, in the last frame."""
        return range(self.canvas - words.SIDE - self.frames + 2)

    @property
    def starts(self) -> range:
        """On a torus, pixels between the edge and the digit in frame 0, along its movement."""
        return range(0, self.canvas, self.start_every)

    @property
    def paths(self) -> list[tuple[int, int]]:
        """Every lane with every end; on a torus, with every place along it."""
        if self.torus:
            return [(lane, start) for lane in self.lanes for start in self.starts]
        return [(lane, end) for lane in self.lanes for end in self.ends]

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse paths that leave the canvas, and held-out prompts that do not exist."""
        canvas, frames, spread = values["canvas"], values["frames"], values["lane_spread"]
        room = canvas - words.SIDE
        if frames - 1 > room and not values["torus"]:
            rule = f"a digit of {words.SIDE} pixels moves {frames - 1} more on a canvas of {canvas}"
            remedy = f"use at most {room + 1} frames, or a larger canvas"
            yield ConfigError("frames", frames, rule, remedy)
        if values["speed"] > 1 and not values["torus"]:
            rule = "with edges a digit moves a pixel a frame"
            yield ConfigError("speed", values["speed"], rule, "use 1, or torus: true")
        if values["start_every"] > 1 and not values["torus"]:
            rule = "with edges a digit begins where it stays on the canvas"
            yield ConfigError("start_every", values["start_every"], rule, "use 1, or torus: true")
        if spread > room // 2:
            rule = f"a digit of {words.SIDE} pixels stays on a canvas of {canvas}"
            yield ConfigError("lane_spread", spread, rule, f"use at most {room // 2}")
        for prompt in sorted(set(values["held_out"]) - set(words.all_prompts())):
            rule, remedy = "it is one of the forty prompts", words.suggest(prompt)
            yield ConfigError("held_out", repr(prompt), rule, remedy)


class TrainingSettings(Section):
    """Training of the model, and its folder."""

    steps: Count = 2600
    """Updates of the parameters."""
    batch_size: Count = 64
    """Videos a step."""
    learning_rate: Positive = 4e-3
    """Its peak: reached after the warm-up, then down along a cosine to a hundredth."""
    warmup_steps: Whole = 50
    """Steps from zero to the peak."""
    weight_decay: NotNegative = 0.01
    """Pull of every weight towards zero."""
    ema_decay: Share = 0.99
    """Memory of the averaged parameters, which are the ones that draw."""
    prompt_dropout: Share = 0.1
    """Share of prompts left empty, which guidance needs."""
    timestep_shift: Positive = 3.0
    """Above 1: more of the noisy times, where digit and direction are decided."""
    forcing: How = "none"
    """Times of blocks drawn apart: blocks see earlier ones noisy (diffusion) or clean (teacher)."""
    context_noise: Annotated[float, Ge(0), Lt(MOST)] = 0.0
    """With teacher: the largest time, of 1000, of the clean frames; the model reads each time."""
    context_dropout: Share = 0.0
    """With teacher: share of clips whose clean frames are noise alone, so that prompts count."""
    prompt_switches: Share = 0.0
    """With teacher: share of clips whose first clean blocks show another digit than the prompt."""
    sink_distance: Whole = 0
    """Furthest, in frames, that a sink is taught to be seen from; 0: as far as a clip reaches."""
    checkpoint_every: Count = 200
    """Steps between checkpoints."""
    log_every: Count = 100
    """Steps between lines, where there is no terminal to draw a bar on."""
    seed: Whole = 0
    """Of parameters, order of videos, times and noise."""
    resume: bool = True
    """Go on from the last checkpoint; false starts again: its first one replaces those there."""
    output_dir: str = "out/wan_tiny"
    """Where checkpoints, pictures and figures go."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse noise of a context that there is none of."""
        yield from of_forcing(values)


class SamplingSettings(Section):
    """Sampling of videos."""

    num_inference_steps: Count = 16
    """Steps from noise to video."""
    guidance_scale: NotNegative = 1.8
    """Classifier-free guidance; 1 is the model as it is, in half the time."""
    timestep_shift: Positive = 4.0
    """Above 1: smaller steps near the noise."""
    per_prompt: Whole = 10
    """Videos of each prompt; 0 draws nothing after training."""
    prompt: str | None = None
    """The one prompt to draw; unset: all forty, judged by a classifier."""
    seed: Whole = 0
    """Of the noise."""


class Settings(ma.AttentionConfig):
    """The keys of attention, and the sections of the program."""

    model: ModelSettings = ModelSettings()
    """Sizes of the transformer."""
    data: DataSettings = DataSettings()
    """The videos."""
    training: TrainingSettings = TrainingSettings()
    """How the model learns."""
    sampling: SamplingSettings = SamplingSettings()
    """How videos are drawn."""
    rollout: StreamSettings | None = None
    """How a video is made block by block; null: all at once."""

    @property
    def stream(self) -> ma.Stream | None:
        """The blocks of a video; None where it is made all at once."""
        _, height, width = self.grid
        return None if self.rollout is None else self.rollout.stream(height * width)

    @property
    def numbered(self) -> tuple[int, int, int]:
        """The patches that a learned table tells apart: of a video, or of a block of a stream."""
        stream, (frames, height, width) = self.stream, self.grid
        return frames if stream is None else stream.frames_per_block, height, width

    @property
    def video_shape(self) -> tuple[int, int, int, int]:
        """Frames, height, width and channels of a video."""
        return (self.data.frames, self.data.canvas, self.data.canvas, 1)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches along frames, height and width."""
        sides = zip(self.video_shape[:3], self.model.patch, strict=True)
        f, h, w = (side // patch for side, patch in sides)
        return f, h, w

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse patches that do not tile the video, on top of attention's own rules."""
        yield from super().contradictions(values)
        data, patch = values["data"], values["model"].patch
        sizes = (data.frames, data.canvas, data.canvas)
        for size, side, what in zip(sizes, patch, PATCH_SIDES, strict=True):
            if size % side:
                rule = f"patches tile the video: {what} of the patch divides {size}"
                divisors = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
                yield ConfigError("model.patch", list(patch), rule, f"use one of {divisors} there")
        yield from stream_settings.contradictions(values)


PATCH_SIDES = ("the first number", "the second number", "the third number")
