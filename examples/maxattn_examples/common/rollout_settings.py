"""The settings of a video that is made block by block: its blocks, its cache and its few steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Lt

import maxattn as ma
from maxattn.config import Imported, Section
from maxattn.errors import ConfigError
from maxattn.tools.self_forcing import load_rollout

from .settings import Count, Dtype, Positive, Whole

MOST = 1000  # the time of noise alone; 0 is the time of a clean frame
Step = Annotated[float, Gt(0), Le(MOST)]


class RolloutSettings(Section):
    """How a video is made block by block."""

    frames_per_block: Count = 3
    """Latent frames that are made together, as in the model's training."""
    window: Count | None = None
    """Blocks that a block sees, its own included; null is all."""
    sink: Whole = 0
    """First frames that stay visible, counted inside the window."""
    first_frame_alone: bool = False
    """Whether frame 0 is a block of its own, as in models of image to video."""
    denoising_steps: tuple[Step, ...] = (1000, 750, 500, 250)
    """Times of the steps of a block, from 1000 (noise) down; 0 (clean) is none of them."""
    warp_steps: bool = True
    """Move the times by timestep_shift; false: the model gets them as they are written."""
    timestep_shift: Positive = 5.0
    """Moves times t to 1000 shift u / (1 + (shift - 1) u) with u = t / 1000."""
    context_noise: Annotated[float, Ge(0), Lt(MOST)] = 0.0
    """The time, of 1000, of the frames that later blocks see; 0 is clean. It is never moved."""
    positions: Literal["absolute", "slots", "slots_with_sink"] = "absolute"
    """Of kept keys: that of their frame, or of their slot in a model that was trained so."""
    clean_pass: bool = True
    """Whether a last pass keeps the clean block; false keeps the last step's noisy keys."""
    cache_dtype: Dtype | None = None
    """Of the cache; null is model.dtype."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse a sink that no window holds, steps that do not fall, and noise without a pass."""
        yield from _of_window(values["frames_per_block"], values["window"], values["sink"])
        yield from _of_steps(values["denoising_steps"])
        if values["context_noise"] and not values["clean_pass"]:
            rule = "it is the time of the clean pass, and clean_pass is false"
            remedy = "set it to 0, or clean_pass: true"
            yield ConfigError("context_noise", values["context_noise"], rule, remedy)
        if values["positions"] == "slots" and values["sink"]:
            rule = "with a sink positions by slots are another function than positions by frames"
            remedy = "write slots_with_sink for a model that was trained so, else absolute"
            yield ConfigError("positions", "slots", rule, remedy)

    @classmethod
    def from_self_forcing(cls, path: str | os.PathLike[str]) -> Imported[Self]:
        """Read a YAML of Self-Forcing, LongLive or their kin.

        Args:
            path: the file.

        Returns:
            (config, left_out, notes), as `AttentionConfig.from_maxdiffusion` does.

        Raises:
            ConfigErrors: for everything wrong in the keys that are taken, with file and line.
        """
        found = load_rollout(path)
        return Imported(cls(**found.rollout), found.left_out, found.notes)

    @property
    def times(self) -> tuple[float, ...]:
        """The model's times in the steps of a block, 1000 (noise) to 0 (clean)."""
        shift = self.timestep_shift if self.warp_steps else 1.0
        parts = (step / MOST for step in self.denoising_steps)
        return tuple(MOST * shift * u / (1 + (shift - 1) * u) for u in parts)

    def stream(self, tokens_per_frame: int) -> ma.Stream:
        """Make the `Stream` that masks and cache come from.

        Args:
            tokens_per_frame: tokens of a latent frame: rows times columns of patches.
        """
        sizes = self.frames_per_block, self.window, self.sink, self.first_frame_alone
        return ma.Stream(tokens_per_frame, *sizes)


def _of_window(size: int, window: int | None, sink: int) -> Iterator[ConfigError]:
    """Refuse a sink without a window, and one that leaves no room for a block."""
    if not sink:
        return
    if window is None:
        rule = "a sink is counted inside the window, and without one every frame stays"
        yield ConfigError("sink", sink, rule, "set window, or remove sink")
        return
    most = (window - 1) * size
    if sink > most:
        rule = f"sink and a block both fit {window} blocks of {size} frames"
        yield ConfigError("sink", sink, rule, f"write at most {most}, or a larger window")


def _of_steps(steps: tuple[float, ...]) -> Iterator[ConfigError]:
    """Refuse no steps, and steps that do not go towards the clean frame."""
    if not steps:
        rule = "a block is made in one step or more"
        yield ConfigError("denoising_steps", "[]", rule, "write for example [1000, 750, 500, 250]")
    if any(later >= step for step, later in pairwise(steps)):
        rule = "each time is below the one before it, since steps go from noise to a clean frame"
        yield ConfigError("denoising_steps", list(steps), rule, "write them from 1000 down")
