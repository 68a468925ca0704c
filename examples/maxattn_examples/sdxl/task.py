"""What SDXL learns: the noise (or v) in noisy latents, from a text and the picture's sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.shapes import Form, Shapes, shape_errors
from maxattn_examples.samplers.euler import Betas
from maxattn_examples.samplers.sampler import Sampler
from maxattn_examples.train.task import Arrays, LatentTask, replaced

from . import noise
from .sampling import SdxlSamplingTask, plans
from .settings import Settings
from .sizes import SIZE_NUMBERS, Sizes
from .unet import UNet


@dataclass(frozen=True)
class SdxlTask(LatentTask):
    """Train an SDXL UNet."""

    settings: Settings
    sizes: Sizes

    family: ClassVar[Family] = "sdxl"
    sizes_class, model_class, sampling_class = Sizes, UNet, SdxlSamplingTask
    folder_of_model = "unet"

    @property
    def sampler(self) -> Sampler:
        """What pictures are drawn with; it says which times there are."""
        found = self.settings.sampling.sampler_of(self.settings.model.folder)
        asked = self.settings.model.prediction_type
        if asked is None:
            return found
        return replace(found, options={**found.options, "prediction_type": asked})

    @cached_property
    def betas(self) -> Betas:
        """The noise level of each time, and the prediction type of the UNet."""
        return Betas(**{key: self.sampler.options[key] for key in Betas.__dataclass_fields__})

    def shape_errors(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield the arrays of the data that do not fit the UNet."""
        sizes, halvings = self.sizes, 2 ** (len(self.sizes.block_out_channels) - 1)
        expected: dict[str, Form] = {
            "latents": (sizes.in_channels, f"{halvings} h", f"{halvings} w"),
            "text": ("L", sizes.cross_attention_dim),
            "pooled": (sizes.pooled_dim,),
            "time_ids": (SIZE_NUMBERS,),
        }
        return shape_errors(shapes, expected, "an SDXL UNet")

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Draw times and noise; replace some texts by the empty one."""
        rate, (for_noise, for_texts) = (
            self.settings.training.condition_dropout,
            jax.random.split(key),
        )
        clean = jnp.moveaxis(batch["latents"].astype(jnp.float32), 1, -1)
        drawn = noise.noised(clean, for_noise, self.betas)
        dropped = jax.random.bernoulli(for_texts, rate, drawn.times.shape)
        told = {name: replaced(batch[name], empty[name], dropped) for name in ("text", "pooled")}
        return {**drawn._asdict(), "time_ids": batch["time_ids"], **told}

    def loss(self, model: UNet, examples: Arrays) -> Float[Array, ""]:
        """Return the mean squared error of the prediction, each example weighted by its time."""
        times = examples["times"]
        text, pooled, picture = (examples[name] for name in ("text", "pooled", "time_ids"))
        predicted = model(examples["mixed"], times.astype(jnp.float32), text, pooled, picture)
        off = jnp.mean((predicted.astype(jnp.float32) - examples["target"]) ** 2, axis=(1, 2, 3))
        return jnp.mean(off * noise.weights(times, self.settings.training.snr_gamma, self.betas))

    def plans(self, shapes: Shapes, mesh: jax.sharding.Mesh | None) -> dict[str, ma.Plan]:
        """Plan self- and cross-attention at every resolution that attends."""
        batch, latents, text = self.examples_at_once, shapes["latents"], shapes["text"][0]
        return plans(self.settings, self.sizes, batch, latents, text, mesh)

    def tokens(self, shapes: Shapes) -> int:
        """Count the pixels of the latents."""
        _, height, width = shapes["latents"]
        return height * width
