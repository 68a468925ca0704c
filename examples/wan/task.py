"""What there is to learn for Wan 2.1: velocities of noisy latents, from a text and, for
image-to-video, an image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from generate.folder import part_of
from jaxtyping import Array, Float
from samplers.read import Sampler
from train import flow
from train.latent_task import LatentTask
from train.task import Arrays, Shapes, replaced
from train.wrong import unlike

import maxattn as ma
from maxattn.config.errors import ConfigErrors
from maxattn.errors import ConfigError

from .model import WanTransformer3D
from .plans import plans, tokens
from .settings import ModelSettings, Settings
from .sizes import Sizes


@dataclass(frozen=True)
class WanTask(LatentTask):
    """Train a Wan 2.1 transformer by flow matching.

    Args:
        settings: of everything.
        sizes: of the model.
    """

    settings: Settings
    sizes: Sizes

    part: ClassVar[str] = "transformer"

    @classmethod
    def of(cls, settings: Settings) -> WanTask:
        """Take the sizes from the settings, or from the model's folder; `sizes_of` says what it
        raises.
        """
        return cls(settings, sizes_of(settings.model))

    @property
    def sampler(self) -> Sampler:
        """What videos are drawn with."""
        return self.settings.sampling.sampler_of(self.settings.model.folder)

    def drawing(self) -> Any:
        """Say how the transformer is called in sampling."""
        from .drawing import WanDrawing  # pictures alone need it

        return WanDrawing(self.settings, self.sizes, Path())

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> WanTransformer3D:
        """Build the transformer."""
        model = self.settings.model
        how = {"dtype": jnp.dtype(model.dtype), "param_dtype": jnp.dtype(model.param_dtype)}
        return WanTransformer3D(self.sizes, self.settings, mesh, rngs=rngs, **how)

    def wrong(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield what the transformer cannot take of the data."""
        sizes, (frames, rows, columns) = self.sizes, self.sizes.patch_size
        expected: dict[str, tuple[Any, ...]] = {
            "latents": (sizes.out_channels, f"{frames} f", f"{rows} h", f"{columns} w"),
            "text": ("L", sizes.text_dim),
        }
        if sizes.image_dim is not None:
            latents = shapes.get("latents", ("F", "h", "w"))
            expected["image"] = ("S", sizes.image_dim)
            expected["condition"] = (sizes.in_channels - sizes.out_channels, *latents[1:])
        kind = "text-to-video" if sizes.image_dim is None else "image-to-video"
        yield from unlike(shapes, expected, f"a model for {kind}")

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Draw times and noise; replace some texts by the empty one."""
        for_times, for_noise, for_texts = jax.random.split(key, 3)
        said, clean = self.settings.training, channels_last(batch["latents"].astype(jnp.float32))
        how = (said.timestep_shift, said.timestep_sampling, said.logit_mean, said.logit_std)
        drawn = flow.noised(clean, flow.times(for_times, len(clean), *how), for_noise)
        dropped = jax.random.bernoulli(for_texts, said.condition_dropout, drawn.times.shape)
        text = replaced(batch["text"], empty["text"], dropped)
        more = {name: batch[name] for name in ("image", "condition") if name in batch}
        return {
            "mixed": drawn.mixed,
            "times": drawn.times,
            "velocity": drawn.velocity,
            "text": text,
            **more,
        }

    def loss(self, model: WanTransformer3D, examples: Arrays) -> Float[Array, ""]:
        """Return the mean square of what the predicted velocity is off."""
        x = examples["mixed"]
        if "condition" in examples:
            x = jnp.concatenate([x, channels_last(examples["condition"].astype(x.dtype))], axis=-1)
        velocity = model(x, 1000.0 * examples["times"], examples["text"], examples.get("image"))
        return jnp.mean((velocity.astype(jnp.float32) - examples["velocity"]) ** 2)

    def plans(self, shapes: Shapes, mesh: jax.sharding.Mesh | None) -> dict[str, ma.Plan]:
        """Plan self- and cross-attention, the image's too."""
        lengths = {name: shapes[name][0] for name in ("text", "image") if name in shapes}
        return plans(
            self.settings, self.sizes, self.examples_at_once, shapes["latents"], lengths, mesh
        )

    def tokens(self, shapes: Shapes) -> int:
        """Count the patches of a video."""
        return tokens(self.sizes, shapes["latents"])


def channels_last(x: Float[Array, "B C ..."]) -> Float[Array, "B ... C"]:
    """Move the channels behind the places."""
    return jnp.moveaxis(x, 1, -1)


def sizes_of(model: ModelSettings) -> Sizes:
    """Return the sizes of the model: those of its folder, those that are named, or both when they
    agree.

    Raises:
        ConfigError: there is no such folder.
        WeightsError: the folder says no sizes, or those of another model.
        ConfigErrors: the folder's sizes are not those that are named.
    """
    if model.folder is None:
        return model.asked or Sizes()
    there = Sizes.of_folder(part_of(model.folder, "transformer"))
    if model.asked is not None and (
        problems := list(_differences(model.asked, there, model.folder))
    ):
        raise ConfigErrors(problems)
    return there


def _differences(asked: Sizes, there: Sizes, folder: str) -> Iterator[ConfigError]:
    for key, value in vars(asked).items():
        if (found := getattr(there, key)) != value:
            rule = f"the model in {folder} has {found}"
            yield ConfigError(
                f"model.{key}",
                value,
                rule,
                "name its sizes, or write model.sizes=null to take them",
            )
