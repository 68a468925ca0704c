"""Wan 2.1 in sampling: sizes of the video, what the transformer is told, and how it is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from common.pipeline_folder import config_of
from common.shapes import Form
from flax import nnx
from jaxtyping import Array, Float
from sample import media
from sample.task import Arrays
from samplers.read import Sampler

import maxattn as ma
from maxattn.errors import ConfigError

from . import torch_parts
from .model import WanTransformer3D
from .plans import plans
from .settings import Settings
from .sizes import Sizes


@dataclass(frozen=True)
class WanSamplingTask:
    """Draw videos with a Wan 2.1 transformer.

    Args:
        settings: of everything.
        sizes: of the model.
        folder: the pipeline's; its vae says how many pixels and frames a latent stands for, 8 and 4
            without one.
    """

    settings: Settings
    sizes: Sizes
    folder: Path

    part: Literal["transformer"] = "transformer"

    @property
    def takes_image(self) -> bool:
        """Whether it is an image-to-video model."""
        return self.sizes.image_dim is not None

    @property
    def needs_torch(self) -> tuple[str, ...]:
        """The parts that encode a prompt (and an image)."""
        image = ("image_encoder", "image_processor", "vae") if self.takes_image else ()
        return ("tokenizer", "text_encoder", *image)

    @cached_property
    def scale(self) -> tuple[int, int, int]:
        """Frames, rows and columns of pixels for one of latents."""
        vae = config_of(self.folder, "vae")
        side = vae.get("scale_factor_spatial", 8)
        return (vae.get("scale_factor_temporal", 4), side, side)

    @property
    def latents(self) -> tuple[int, ...]:
        """[C, F, h, w] of one video."""
        s, (time, rows, columns) = self.settings.sampling, self.scale
        frames = (s.frames - 1) // time + 1
        return (self.sizes.out_channels, frames, s.height // rows, s.width // columns)

    def sampler(self) -> Sampler:
        """Choose the sampler, as the pipeline and the settings say."""
        return self.settings.sampling.sampler_of(str(self.folder))

    def size_errors(self) -> Iterable[ConfigError]:
        """Yield sides and frames that tokens do not divide, and models of two images."""
        if self.sizes.pos_embed_seq_len is not None:
            rule = "a model of first and last frame takes two images, which sampling does not"
            yield ConfigError("model.folder", self.folder, rule, "give another")
        pixels = (
            scale * patch for scale, patch in zip(self.scale, self.sizes.patch_size, strict=True)
        )
        frames, *sides = pixels
        for key, unit in zip(("height", "width"), sides, strict=True):
            if (value := getattr(self.settings.sampling, key)) % unit:
                near = f"use {max(unit, value // unit * unit)} or {(value // unit + 1) * unit}"
                rule = f"a token stands for {unit} pixels of it"
                yield ConfigError(f"sampling.{key}", value, rule, near)
        yield from self._frame_errors(frames)

    def _frame_errors(self, unit: int) -> Iterable[ConfigError]:
        frames = self.settings.sampling.frames
        if (frames - 1) % unit:
            below = (frames - 1) // unit * unit + 1
            rule = f"the first frame, then latents of {unit} frames each"
            yield ConfigError("sampling.frames", frames, rule, f"use {below} or {below + unit}")

    def expected(self, guided: bool) -> dict[str, Form]:
        """Return text, and for image-to-video the image's states and the condition."""
        sizes = self.sizes
        forms: dict[str, Form] = {"text": ("L", sizes.text_dim)}
        if guided:
            forms["negative_text"] = ("L", sizes.text_dim)
        if sizes.image_dim is not None:
            forms["image"] = ("L", sizes.image_dim)
            forms["condition"] = (sizes.in_channels - sizes.out_channels, *self.latents[1:])
        return forms

    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Encode the prompts, and an image, with the folder's encoders."""
        s = self.settings.sampling
        prompts = {"text": [s.prompt or ""], "negative_text": [s.negative_prompt or ""]}
        arrays = torch_parts.texts(folder, prompts, s.text_tokens, s.torch_device)
        if image is not None:
            size = (s.frames, s.height, s.width)
            arrays |= torch_parts.image(folder, image, size, s.torch_device)
        return arrays

    def completed(self, arrays: Arrays) -> Arrays:
        """Return them as they are: the sizes are those of the noise."""
        return arrays

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> WanTransformer3D:
        """Build the transformer."""
        dtype, kept = self.settings.model.dtype, self.settings.sampling.weights_dtype
        how = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(kept)}
        return WanTransformer3D(self.sizes, self.settings, mesh, rngs=rngs, **how)

    def told(self, model: Any, arrays: Mapping[str, Array]) -> Any:
        """Compute the keys and values of text and image in every block, once for all steps."""
        kv = model.encode(arrays["text"], arrays.get("image"))
        condition = arrays.get("condition")
        return kv, None if condition is None else jnp.moveaxis(condition.astype(jnp.float32), 1, -1)

    def predict(
        self, model: Any, x: Float[Array, "B F H W C"], t: Float[Array, " B"], told: Any
    ) -> Array:
        """Predict the velocity, the condition's channels behind the noise's."""
        kv, condition = told
        x = x if condition is None else jnp.concatenate([x, condition], axis=-1)
        return model(x, t, kv=kv)

    def plans(self, rows: int, lengths: Mapping[str, int], mesh: Any) -> dict[str, ma.Plan]:
        """Plan self- and cross-attention, the image's too."""
        return plans(self.settings, self.sizes, rows, self.latents, lengths, mesh)

    def decode(self, folder: Path, latents: np.ndarray, out: Path) -> list[Path]:
        """Decode latents and write videos."""
        videos = torch_parts.decode(folder, latents, self.settings.sampling.torch_device)
        fps = self.settings.sampling.fps
        return [media.video(video, out / f"{i:03}", fps) for i, video in enumerate(videos)]
