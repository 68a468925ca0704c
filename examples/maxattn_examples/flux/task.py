"""Train Flux.1 to predict velocities of noisy latents from a text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.shapes import Form, Shapes, shape_errors
from maxattn_examples.samplers.sampler import Sampler
from maxattn_examples.train import flow
from maxattn_examples.train.task import Arrays, LatentTask, replaced

from .model import FluxTransformer2D
from .sampling import FluxSamplingTask, plans, tokens
from .settings import PATCH, Settings, Sizes


@dataclass(frozen=True)
class FluxTask(LatentTask):
    """Train a Flux.1 transformer by flow matching."""

    settings: Settings
    sizes: Sizes

    family: ClassVar[Family] = "flux"
    sizes_class, model_class, sampling_class = Sizes, FluxTransformer2D, FluxSamplingTask

    @property
    def sampler(self) -> Sampler:
        """The sampler for pictures after training."""
        return self.settings.sampling.sampler_of(self.settings.model.folder, self.sizes)

    def shape_errors(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield an error for each array of the data that does not fit the transformer."""
        expected: dict[str, Form] = {
            "latents": (self.sizes.channels, f"{PATCH} h", f"{PATCH} w"),
            "text": ("L", self.sizes.joint_attention_dim),
            "pooled": (self.sizes.pooled_projection_dim,),
        }
        return shape_errors(shapes, expected, "a Flux.1 model")

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Draw times and noise; replace some texts by the empty one."""
        for_times, for_noise, for_texts = jax.random.split(key, 3)
        said = self.settings.training
        clean = jnp.moveaxis(batch["latents"].astype(jnp.float32), 1, -1)
        drawn = flow.drawn(clean, said, for_times, for_noise)
        dropped = jax.random.bernoulli(for_texts, said.condition_dropout, drawn.times.shape)
        told = {name: replaced(batch[name], empty[name], dropped) for name in ("text", "pooled")}
        return {**drawn._asdict(), **told}

    def loss(self, model: FluxTransformer2D, examples: Arrays) -> Float[Array, ""]:
        """Return the mean squared error of the predicted velocity."""
        times = examples["times"]
        scale = jnp.full_like(times, self.settings.training.embedded_guidance)
        guidance = scale if self.sizes.guidance_embeds else None
        told = (examples["text"], examples["pooled"], guidance)
        velocity = model(examples["mixed"], 1000.0 * times, *told)
        return jnp.mean((velocity.astype(jnp.float32) - examples["velocity"]) ** 2)

    def plans(self, shapes: Shapes, mesh: jax.sharding.Mesh | None) -> dict[str, ma.Plan]:
        """Plan the joint attention of text and picture."""
        batch, latents, text = self.examples_at_once, shapes["latents"], shapes["text"][0]
        return plans(self.settings, self.sizes, batch, latents, text, mesh)

    def tokens(self, shapes: Shapes) -> int:
        """Count the patches of a picture."""
        return tokens(shapes["latents"])
