"""What the sampling of pictures has in common: their size, one model for all steps, decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import config_of
from maxattn_examples.common.size_types import size_of

from . import media, torch_pictures
from .task import Arrays, Expert, Part


@dataclass(frozen=True)
class PictureTask:
    """Begin a `SamplingTask` that draws pictures with one model.

    Args:
        settings: of everything.
        sizes: of the model.
        folder: the pipeline's; its vae says how many pixels a latent stands for, 8 without one.
    """

    settings: Any
    sizes: Any
    folder: Path

    part: Part = "transformer"
    takes_image: bool = False
    needs_image: bool = False
    needs_torch: tuple[str, ...] = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")

    @property
    def embedded_guidance(self) -> float | None:
        """The guidance that is an input of the model: none."""
        return None

    @cached_property
    def scale(self) -> int:
        """Pixels along a side of one of latents."""
        vae = config_of(self.folder, "vae")
        return 2 ** (len(size_of(vae, "block_out_channels", tuple[int, ...], (1,) * 4)) - 1)

    def sides(self) -> tuple[int, int]:
        """Return rows and columns of the latents."""
        s = self.settings.sampling
        return s.height // self.scale, s.width // self.scale

    def undivided(self, latents: int, rule: str) -> Iterator[ConfigError]:
        """Yield heights and widths that so many latents do not divide.

        Args:
            latents: along a side.
            rule: that it breaks, with {unit} for the pixels.
        """
        unit = self.scale * latents
        for key in ("height", "width"):
            if (value := getattr(self.settings.sampling, key)) % unit:
                near = f"use {max(unit, value // unit * unit)} or {(value // unit + 1) * unit}"
                yield ConfigError(f"sampling.{key}", value, rule.format(unit=unit), near)

    def completed(self, arrays: Arrays) -> Arrays:
        """Return the arrays as they are."""
        return arrays

    def experts(self, times: Any) -> tuple[Expert, ...]:
        """Take all steps with one model."""
        sampling = self.settings.sampling
        return (Expert(self.part, len(times), sampling.cfg_scale, sampling.guided),)

    def time_states(self, weights: Path, times: np.ndarray, which: str) -> None:
        """Say that the model makes nothing of a time alone."""

    def finished(
        self, x: Float[Array, "B H W C"], told: Mapping[str, Array]
    ) -> Float[Array, "B H W C"]:
        """Return the sample as it is."""
        return x

    def pixels(self, folder: Path, latents: np.ndarray) -> list[np.ndarray]:
        """Decode latents into pictures."""
        return torch_pictures.decode(folder, latents, self.settings.sampling.torch_device)

    def write(self, shown: list[np.ndarray], out: Path) -> list[Path]:
        """Write pictures."""
        return [media.picture(picture, out / f"{i:03}.png") for i, picture in enumerate(shown)]
