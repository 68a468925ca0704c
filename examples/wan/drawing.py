"""What sampling has to know of Wan 2.1: sizes of the video, what the transformer is told, and how
it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from generate.folder import config_of
from generate.kind import Arrays
from jaxtyping import Array, Float
from samplers.read import Sampler

import maxattn as ma
from maxattn.errors import ConfigError

from .model import WanTransformer3D
from .plans import plans
from .settings import Settings
from .sizes import Sizes


@dataclass(frozen=True)
class WanDrawing:
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
        return (
            self.sizes.out_channels,
            (s.frames - 1) // time + 1,
            s.height // rows,
            s.width // columns,
        )

    def sampler(self) -> Sampler:
        """Choose the sampler, as the pipeline and the settings say."""
        return self.settings.sampling.sampler_of(str(self.folder))

    def wrong_sizes(self) -> Iterable[ConfigError]:
        """Yield heights, widths and frames that latents or patches do not divide into, and models
        of two images.
        """
        if self.sizes.pos_embed_seq_len is not None:
            rule, remedy = (
                "a model of first and last frame takes two images, which sampling does not",
                "give another",
            )
            yield ConfigError("model.folder", self.folder, rule, remedy)
        s, (time, *sides), (frames, *patch) = (
            self.settings.sampling,
            self.scale,
            self.sizes.patch_size,
        )
        for key, side, ratio in zip(("height", "width"), sides, patch, strict=True):
            unit, value = side * ratio, getattr(s, key)
            if value % unit:
                near = f"use {max(unit, value // unit * unit)} or {(value // unit + 1) * unit}"
                yield ConfigError(
                    f"sampling.{key}", value, f"a token stands for {unit} pixels of it", near
                )
        unit = time * frames
        if (s.frames - 1) % unit:
            near = (
                f"use {(s.frames - 1) // unit * unit + 1} or"
                f" {((s.frames - 1) // unit + 1) * unit + 1}"
            )
            yield ConfigError(
                "sampling.frames",
                s.frames,
                f"the first frame, then latents of {unit} frames each",
                near,
            )

    def expected(self, guided: bool) -> dict[str, tuple[Any, ...]]:
        """Return text, and for image-to-video the image's states and the condition."""
        found: dict[str, tuple[Any, ...]] = {"text": ("L", self.sizes.text_dim)}
        if guided:
            found["negative_text"] = ("L", self.sizes.text_dim)
        if self.takes_image:
            found["image"] = ("L", self.sizes.image_dim)
            found["condition"] = (
                self.sizes.in_channels - self.sizes.out_channels,
                *self.latents[1:],
            )
        return found

    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Encode the prompts, and an image, with the folder's encoders."""
        from generate import torch_wan

        s = self.settings.sampling
        prompts = {"text": [s.prompt or ""], "negative_text": [s.negative_prompt or ""]}
        arrays = torch_wan.texts(folder, prompts, s.text_tokens, s.torch_device)
        if image is not None:
            size = (s.frames, s.height, s.width)
            arrays |= torch_wan.image(folder, image, size, s.torch_device)
        return arrays

    def completed(self, arrays: Arrays) -> Arrays:
        """Return them as they are: the sizes are those of the noise."""
        return arrays

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> WanTransformer3D:
        """Build the transformer."""
        dtype, kept = self.settings.model.dtype, self.settings.sampling.weights_dtype
        return WanTransformer3D(
            self.sizes,
            self.settings,
            mesh,
            dtype=jnp.dtype(dtype),
            param_dtype=jnp.dtype(kept),
            rngs=rngs,
        )

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
        from generate import media, torch_wan

        videos = torch_wan.decode(folder, latents, self.settings.sampling.torch_device)
        return [
            media.video(frames, out / f"{i:03}", self.settings.sampling.fps)
            for i, frames in enumerate(videos)
        ]
