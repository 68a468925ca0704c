"""What there is to learn for SDXL: the noise (or v) in noisy latents, from a text and the picture's
sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from generate.folder import part_of
from jaxtyping import Array, Float
from samplers.betas import Betas
from samplers.read import Sampler
from train.latent_task import LatentTask
from train.task import Arrays, Shapes, replaced
from train.wrong import unlike

import maxattn as ma
from maxattn.config.errors import ConfigErrors
from maxattn.errors import ConfigError

from . import noise
from .plans import plans
from .settings import ModelSettings, Settings
from .sizes import Sizes
from .unet import SIZE_NUMBERS, UNet


@dataclass(frozen=True)
class SdxlTask(LatentTask):
    """Train an SDXL UNet.

    Args:
        settings: of everything.
        sizes: of the UNet.
    """

    settings: Settings
    sizes: Sizes

    part: ClassVar[str] = "unet"

    @classmethod
    def of(cls, settings: Settings) -> SdxlTask:
        """Take the sizes from the settings, or from the model's folder; `sizes_of` says what it
        raises.
        """
        return cls(settings, sizes_of(settings.model))

    @property
    def sampler(self) -> Sampler:
        """What pictures are drawn with, and what says which times there are."""
        found = self.settings.sampling.sampler_of(self.settings.model.folder)
        asked = self.settings.model.prediction_type
        return (
            found
            if asked is None
            else replace(found, options={**found.options, "prediction_type": asked})
        )

    @cached_property
    def betas(self) -> Betas:
        """How much noise there is at each time, and what the UNet says of it."""
        return Betas(**{key: self.sampler.options[key] for key in Betas.__dataclass_fields__})

    def drawing(self) -> Any:
        """Say how the UNet is called in sampling."""
        from .drawing import SdxlDrawing  # pictures alone need it

        return SdxlDrawing(self.settings, self.sizes, Path())

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> UNet:
        """Build the UNet."""
        model = self.settings.model
        how = {"dtype": jnp.dtype(model.dtype), "param_dtype": jnp.dtype(model.param_dtype)}
        return UNet(self.sizes, self.settings, mesh, rngs=rngs, **how)

    def wrong(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield what the UNet cannot take of the data."""
        sizes, halvings = self.sizes, 2 ** (len(self.sizes.block_out_channels) - 1)
        numbers = SIZE_NUMBERS * sizes.addition_time_embed_dim
        expected = {
            "latents": (sizes.in_channels, f"{halvings} h", f"{halvings} w"),
            "text": ("L", sizes.cross_attention_dim),
            "pooled": (sizes.projection_class_embeddings_input_dim - numbers,),
            "time_ids": (SIZE_NUMBERS,),
        }
        yield from unlike(shapes, expected, "an SDXL UNet")

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Draw times and noise; replace some texts by the empty one."""
        settings, (for_noise, for_texts) = self.settings, jax.random.split(key)
        clean = jnp.moveaxis(batch["latents"].astype(jnp.float32), 1, -1)
        drawn = noise.noised(clean, for_noise, self.betas)
        dropped = jax.random.bernoulli(
            for_texts, settings.training.condition_dropout, drawn.times.shape
        )
        told = {name: replaced(batch[name], empty[name], dropped) for name in ("text", "pooled")}
        return {
            "mixed": drawn.mixed,
            "times": drawn.times,
            "target": drawn.target,
            "time_ids": batch["time_ids"],
            **told,
        }

    def loss(self, model: UNet, examples: Arrays) -> Float[Array, ""]:
        """Return the mean square of what the prediction is off, each example weighted by its
        time.
        """
        times = examples["times"]
        said = model(
            examples["mixed"],
            times.astype(jnp.float32),
            examples["text"],
            examples["pooled"],
            examples["time_ids"],
        )
        off = jnp.mean((said.astype(jnp.float32) - examples["target"]) ** 2, axis=(1, 2, 3))
        return jnp.mean(off * noise.weights(times, self.settings.training.snr_gamma, self.betas))

    def plans(self, shapes: Shapes, mesh: jax.sharding.Mesh | None) -> dict[str, ma.Plan]:
        """Plan self- and cross-attention at every resolution that attends."""
        return plans(
            self.settings,
            self.sizes,
            self.examples_at_once,
            shapes["latents"],
            shapes["text"][0],
            mesh,
        )

    def tokens(self, shapes: Shapes) -> int:
        """Count the pixels of the latents."""
        _, height, width = shapes["latents"]
        return height * width


def sizes_of(model: ModelSettings) -> Sizes:
    """Return the sizes of the UNet: those of its folder, or SDXL's with the settings' changes.

    Raises:
        ConfigError: there is no such folder.
        WeightsError: the folder says no sizes, or those of another model.
        ConfigErrors: the folder's sizes are not those of the settings.
    """
    if model.folder is None:
        return Sizes(**model.changed_sizes)
    there = Sizes.of_folder(part_of(model.folder, "unet"))
    if problems := list(_differences(model, there)):
        raise ConfigErrors(problems)
    return there


def _differences(model: ModelSettings, there: Sizes) -> Iterator[ConfigError]:
    for key, value in model.changed_sizes.items():
        if (found := getattr(there, key)) != value:
            rule = f"the UNet in {model.folder} has {found}"
            yield ConfigError(f"model.{key}", value, rule, "remove it: the folder says the sizes")
