"""Train Wan to predict velocities of noisy latents from a text (and an image)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.settings import RolloutSettings
from maxattn_examples.common.shapes import Form, Shapes, shape_errors
from maxattn_examples.train import flow, forcing
from maxattn_examples.train.settings import MOST
from maxattn_examples.train.task import KEPT, Arrays, Fixed, LatentTask, replaced

from . import experts
from .model import WanTransformer3D
from .sampling import WanSamplingTask, plans, tokens
from .settings import Settings, Sizes

# The keys of a rollout that training depends on; those of drawing may change.
FORCED = (
    "training.forcing", "training.context_noise", "training.context_dropout",
    "rollout.frames_per_block", "rollout.window", "rollout.sink", "rollout.first_frame_alone",
)  # fmt: skip


@dataclass(frozen=True)
class WanTask(LatentTask):
    """Train a Wan transformer by flow matching."""

    settings: Settings
    sizes: Sizes

    family: ClassVar[Family] = "wan"
    sizes_class, model_class, sampling_class = Sizes, WanTransformer3D, WanSamplingTask

    fixed: ClassVar[Fixed] = Fixed(
        (*KEPT.keys, "training.expert", "training.boundary_ratio", *FORCED), KEPT.free
    )

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Make the task; its sizes come from the settings, or from the model's folder.

        Raises:
            ConfigErrors: the expert is not named, or the folder does not have it.
            ConfigError, WeightsError: as `found`.
        """
        if problems := list(experts.errors(settings)):
            raise ConfigErrors(problems)
        return cls(settings, settings.model.found(Sizes, experts.part(settings)))

    @property
    def part(self) -> str:
        """The transformer's folder in a pipeline's."""
        return experts.part(self.settings)

    @property
    def frames_per_block(self) -> int | None:
        """The frames of a block; None if every frame attends to all others."""
        how = self.settings
        return None if how.training.forcing == "none" else how.rollout.frames_per_block

    @cached_property
    def times(self) -> tuple[float, float]:
        """The least time to train at, and the upper bound."""
        return experts.times(self.settings)

    def shape_errors(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield an error for each array of the data that does not fit the transformer."""
        sizes, (frames, rows, columns) = self.sizes, self.sizes.patch_size
        expected: dict[str, Form] = {
            "latents": (sizes.out_channels, f"{frames} f", f"{rows} h", f"{columns} w"),
            "text": ("L", sizes.text_dim),
        }
        if sizes.image_dim is not None:
            expected["image"] = ("S", sizes.image_dim)
        if takes_condition := sizes.in_channels > sizes.out_channels:
            sides = shapes.get("latents", ("F", "h", "w"))[1:]
            expected["condition"] = (sizes.in_channels - sizes.out_channels, *sides)
        kind = "image-to-video" if takes_condition else "text-to-video"
        yield from shape_errors(shapes, expected, f"a model for {kind}")
        if self.settings.training.forcing != "none" and len(shapes.get("latents", ())) == 4:
            yield from whole_blocks(self.settings.rollout, shapes["latents"][1])

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Draw times and noise; replace some texts by the empty one."""
        for_times, for_noise, for_texts = jax.random.split(key, 3)
        said, clean = self.settings.training, channels_last(batch["latents"].astype(jnp.float32))
        if said.forcing == "none":
            drawn = flow.drawn(clean, said, for_times, for_noise, self.times)._asdict()
        else:
            drawn = forcing.noised(clean, for_noise, self._noise(clean.shape))
        dropped = jax.random.bernoulli(for_texts, said.condition_dropout, (len(clean),))
        text = replaced(batch["text"], empty["text"], dropped)
        more = {name: batch[name] for name in ("image", "condition") if name in batch}
        return {**drawn, "text": text, **more}

    def _noise(self, latents: tuple[int, ...]) -> forcing.Noise:
        """Return the noise distribution of clips [B, F, h, w, C] for forcing."""
        said = self.settings.training
        how = {"sampling": said.timestep_sampling, "mean": said.logit_mean, "std": said.logit_std}
        context = said.context_noise / MOST if said.forcing == "teacher" else None
        shift, dropped = said.timestep_shift, said.context_dropout
        more = how | {"within": self.times}
        return forcing.Noise(self._stream(latents), shift, context, dropped, more)

    def _stream(self, latents: tuple[int, ...]) -> ma.Stream:
        _, height, width = self.sizes.patch_size
        return self.settings.rollout.stream(latents[2] // height * (latents[3] // width))

    def loss(self, model: WanTransformer3D, examples: Arrays) -> Float[Array, ""]:
        """Return the mean squared error of the predicted velocity."""
        x = _conditioned(examples["mixed"], examples)
        how: dict[str, Any] = {"positions": examples.get("positions")}
        if examples["times"].ndim == 2:
            seen = forcing.seen(examples, self._stream(x.shape), 1000.0)
            clean = None if seen.clean is None else _conditioned(seen.clean, examples)
            how["forcing"] = replace(seen, clean=clean)
        told = examples["text"], examples.get("image")
        velocity = model(x, 1000.0 * examples["times"], *told, **how)
        return jnp.mean((velocity.astype(jnp.float32) - examples["velocity"]) ** 2)

    def plans(self, shapes: Shapes, mesh: jax.sharding.Mesh | None) -> dict[str, ma.Plan]:
        """Plan self-attention, and cross-attention to text and image."""
        lengths = {name: shapes[name][0] for name in ("text", "image") if name in shapes}
        batch, latents = self.examples_at_once, shapes["latents"]
        how, (_, frames, *sides) = self.settings.training.forcing, latents
        mask = forcing.mask(how, self._stream((batch, frames, *sides)), frames)
        return plans(self.settings, self.sizes, batch, latents, lengths, mesh, mask)

    def tokens(self, shapes: Shapes) -> int:
        """Count the patches of a video."""
        return tokens(self.sizes, shapes["latents"])


def _conditioned(x: Float[Array, "B F h w C"], examples: Arrays) -> Array:
    if "condition" not in examples:
        return x
    return jnp.concatenate([x, channels_last(examples["condition"].astype(x.dtype))], axis=-1)


def whole_blocks(said: RolloutSettings, frames: int) -> Iterable[ConfigError]:
    """Yield an error if a clip's last block is not whole."""
    size, alone = said.frames_per_block, int(said.first_frame_alone)
    if (frames - alone) % size:
        first = ", the first frame alone" if alone else ""
        rule = f"training by forcing takes clips of whole blocks, and these have {frames} frames"
        fits = [n for n in range(1, frames + 1) if not (frames - alone) % n]
        remedy = f"use one of {', '.join(map(str, fits))}, or latents of other clips"
        yield ConfigError("rollout.frames_per_block", f"{size}{first}", rule, remedy)


def channels_last(x: Float[Array, "B C ..."]) -> Float[Array, "B ... C"]:
    """Move the channels from the second axis to the last."""
    return jnp.moveaxis(x, 1, -1)
