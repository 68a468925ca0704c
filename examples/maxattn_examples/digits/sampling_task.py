"""The model of several digits in sampling: prompts need no torch, and samples are pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxattn_examples.sample import media
from maxattn_examples.sample.task import Arrays
from maxattn_examples.wan.sampling import WanSamplingTask
from maxattn_examples.wan.sizes import Sizes

from .scenes import Size
from .settings import Settings
from .words import SCENES

SCALE = 4  # pixels of a file for one of a clip


@dataclass(frozen=True)
class ClipSamplingTask(WanSamplingTask):
    """Draw clips of digits with Wan's transformer.

    Args:
        settings: of everything.
        sizes: of the model.
        folder: the model's.
    """

    settings: Settings  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def needs_torch(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Return the states of the prompts."""
        del folder, image
        s = self.settings.sampling
        prompts = {"text": s.prompt or "", "negative_text": s.negative_prompt or ""}
        return {name: SCENES.encode([prompt]) for name, prompt in prompts.items()}

    def pixels(self, folder: Path, latents: np.ndarray) -> list[np.ndarray]:
        """Return videos: the latents are pixels."""
        del folder
        return list(media.to_pixels(np.moveaxis(latents, 1, -1)).repeat(SCALE, 2).repeat(SCALE, 3))


def size_of_clips(settings: Settings, sizes: Sizes) -> Size:
    """Return the sizes of a clip: those that are drawn."""
    _, frames, height, width = ClipSamplingTask(settings, sizes, Path()).latents
    return Size(frames, height, width, settings.data.digit)
