"""Train SDXL to predict the noise of a picture, or v, from a text and the picture's sizes.

    x_t = a x + s noise,  a = sqrt(alpha_bar_t),  s = sqrt(1 - alpha_bar_t)
    epsilon: the noise        v = a noise - s x
    weight = min(r, gamma) / (r [+ 1 for v]),  r = a^2 / s^2

Source: Ho et al., https://arxiv.org/abs/2006.11239; v, Salimans and Ho,
https://arxiv.org/abs/2202.00512; the weights, Hang et al., https://arxiv.org/abs/2303.09556
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.shapes import Form, Shapes, shape_errors
from maxattn_examples.samplers.discrete import Betas
from maxattn_examples.samplers.sampler import Sampler
from maxattn_examples.train.task import Arrays, LatentTask, replaced

from .sampling import SdxlSamplingTask, plans
from .settings import SIZE_NUMBERS, Settings, Sizes
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
        """The sampler for pictures after training, which gives the times to train on."""
        found = self.settings.sampling.sampler_of(self.settings.model.folder)
        asked = self.settings.model.prediction_type
        if asked is None:
            return found
        return replace(found, options={**found.options, "prediction_type": asked})

    @cached_property
    def betas(self) -> Betas:
        """The noise level at each time, and the UNet's prediction type."""
        return Betas(**{key: self.sampler.options[key] for key in Betas.__dataclass_fields__})

    def shape_errors(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield an error for each array of the data that does not fit the UNet."""
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
        drawn = noised(clean, for_noise, self.betas)
        dropped = jax.random.bernoulli(for_texts, rate, drawn.times.shape)
        told = {name: replaced(batch[name], empty[name], dropped) for name in ("text", "pooled")}
        return {**drawn._asdict(), "time_ids": batch["time_ids"], **told}

    def loss(self, model: UNet, examples: Arrays) -> Float[Array, ""]:
        """Return the mean squared error of the prediction, each example weighted by its time."""
        times = examples["times"]
        text, pooled, picture = (examples[name] for name in ("text", "pooled", "time_ids"))
        predicted = model(examples["mixed"], times.astype(jnp.float32), text, pooled, picture)
        off = jnp.mean((predicted.astype(jnp.float32) - examples["target"]) ** 2, axis=(1, 2, 3))
        return jnp.mean(off * min_snr_weights(times, self.settings.training.snr_gamma, self.betas))

    def plans(self, shapes: Shapes, mesh: jax.sharding.Mesh | None) -> dict[str, ma.Plan]:
        """Plan self- and cross-attention at every resolution that has attention."""
        batch, latents, text = self.examples_at_once, shapes["latents"], shapes["text"][0]
        return plans(self.settings, self.sizes, batch, latents, text, mesh)

    def tokens(self, shapes: Shapes) -> int:
        """Count the pixels of the latents."""
        _, height, width = shapes["latents"]
        return height * width


class Noised(NamedTuple):
    """Noisy latents, and the target of the UNet."""

    mixed: Float[Array, "B ..."]  # x_t
    times: Int[Array, " B"]  # t, whole numbers from 0 (clean) to 999 (noise)
    target: Float[Array, "B ..."]  # the noise, or v


def noised(clean: Float[Array, "B ..."], key: Array, betas: Betas) -> Noised:
    """Draw uniform times and noise, and mix clean latents with it.

    Args:
        betas: the noise level at each time, and the prediction type.
    """
    for_times, for_noise = jax.random.split(key)
    t = jax.random.randint(for_times, clean.shape[:1], 0, betas.num_train_timesteps)
    noise = jax.random.normal(for_noise, clean.shape)
    a, s = (x.reshape(-1, *(1,) * (clean.ndim - 1)) for x in signal_and_noise(t, betas))
    target = noise if betas.prediction_type == "epsilon" else a * noise - s * clean
    return Noised(a * clean + s * noise, t, target)


def signal_and_noise(
    t: Int[Array, " B"], betas: Betas
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Return the factors a and s at these times."""
    alpha_bar = betas.alpha_bar()
    a, s = (jnp.asarray(np.sqrt(x), jnp.float32) for x in (alpha_bar, 1.0 - alpha_bar))
    return a[t], s[t]


def min_snr_weights(t: Int[Array, " B"], gamma: float | None, betas: Betas) -> Float[Array, " B"]:
    """Return the weight of each example; with `gamma` None all are 1."""
    if gamma is None:
        return jnp.ones(t.shape)
    a, s = signal_and_noise(t, betas)
    ratio = (a / s) ** 2
    if betas.prediction_type == "v_prediction":
        return jnp.minimum(ratio, gamma) / (ratio + 1.0)
    return jnp.minimum(1.0, gamma / ratio)
