"""The task of the digits' model: velocities of moving digits, from their prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn.masks import KeyPadding
from maxattn_examples.common.pictures import to_model
from maxattn_examples.common.shapes import Shapes
from maxattn_examples.train import forcing
from maxattn_examples.train.settings import TrainingSettings
from maxattn_examples.train.task import Arrays, Fixed

from . import flow, text
from .model import WanTransformer
from .settings import Settings
from .stream_settings import without_rollout
from .videos import DigitVideos

# The keys of a rollout that training depends on; those of drawing may change.
FORCED = (
    "training.forcing", "training.context_noise", "training.context_dropout",
    "training.sink_distance", "training.prompt_switches",
    "rollout.frames_per_block", "rollout.window", "rollout.sink",
)  # fmt: skip


class Digits(DigitVideos):
    """Offer the videos that are trained on, as the loop wants to know them."""

    note: str = ""
    kind: str = "digits"
    model: str = "demo"

    @property
    def empty(self) -> dict[str, np.ndarray]:
        """Nothing: the empty prompt is made of its tokens."""
        return {}

    @property
    def shapes(self) -> Shapes:
        """The shapes of a video and its tokens."""
        return {name: array.shape for name, array in self[0].items()}

    @property
    def fingerprint(self) -> str:
        """How many videos there are; which, the settings say."""
        return f"{len(self)} digits"


class SwitchedDigits(Digits):
    """Offer beside each video one of another digit that moves alike: what it may have been."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return super().__getitem__(index) | {"before": to_model(self.before(int(index)))}


@dataclass(frozen=True)
class DigitsTask:
    """Train the digits' model.

    Args:
        settings: of everything.
    """

    settings: Settings

    fixed: ClassVar[Fixed] = Fixed(
        ("model", "data", "training.batch_size", "training.seed", *FORCED)
    )
    folder: None = None
    sizes: None = None
    sampler: None = None
    frames_per_block: None = None  # it is written where a model is exported

    @property
    def part(self) -> str:
        """The folder of a pipeline that would hold the model."""
        return "transformer"

    @property
    def training(self) -> TrainingSettings:
        """The settings of training, with the fixed ones."""
        own = self.settings.training
        values: dict[str, Any] = {key: getattr(own, key) for key in SAME}
        values |= {"learning_rate_schedule": "cosine", "adam_b2": 0.99}
        values |= {"condition_dropout": own.prompt_dropout, "tensorboard": False, "export": False}
        return TrainingSettings(**values)

    def source(self) -> Digits:
        """Open the digits."""
        source = SwitchedDigits if self.settings.training.prompt_switches else Digits
        return source(self.settings.data)

    def load(self, model: nnx.Module, mesh: jax.sharding.Mesh | None) -> bool:
        """Begin from random parameters."""
        return False

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> WanTransformer:
        """Build the transformer."""
        return WanTransformer(self.settings, mesh, rngs=rngs)

    def shape_errors(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield forcing without blocks; all sizes were checked with the settings."""
        return without_rollout(self.settings.training) if self.settings.rollout is None else ()

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Draw times and noise; replace some prompts by the empty one."""
        how = batch["video"], batch["tokens"], key, self.settings.training
        stream = self.settings.stream
        if stream is None or self.settings.training.forcing == "none":
            return flow.noised(*how)
        return flow.forced(*how, stream, batch.get("before"))

    def loss(self, model: Any, examples: Arrays) -> Float[Array, ""]:
        """Measure how far the predicted velocity is off."""
        return flow.loss(model, examples)

    def plans(self, shapes: Shapes, mesh: jax.sharding.Mesh | None) -> dict[str, ma.Plan]:
        """Plan self- and cross-attention of a training step, as the model will call them."""
        settings, batch = self.settings, self.settings.training.batch_size
        model, mask = settings.model, self.forcing_mask
        heads = (model.heads, model.dim_head)
        tokens = self.tokens(shapes) * (2 if settings.training.forcing == "teacher" else 1)
        video = jax.ShapeDtypeStruct((batch, tokens, *heads), jnp.float32)
        words = jax.ShapeDtypeStruct((batch, text.LENGTH, *heads), jnp.float32)
        padding = KeyPadding(np.full(batch, text.LENGTH, np.int32))
        cross = ma.Call.of(video, words, padding, role="cross")
        calls = {"self": ma.Call.of(video, video, mask), "cross": cross}
        return {role: ma.plan(call, settings, mesh) for role, call in calls.items()}

    @property
    def forcing_mask(self) -> Any:
        """The mask of self-attention in a training step; None where frames see each other."""
        how, stream = self.settings.training.forcing, self.settings.stream
        return None if stream is None else forcing.mask(how, stream, self.settings.data.frames)

    def tokens(self, shapes: Shapes) -> int:
        """Count the patches of a video."""
        return math.prod(self.settings.grid)

    def sampling_task(self) -> None:
        """Return nothing: the digits are drawn after training, not during it."""


# Keys that the digits' settings share with every training run's.
SAME = (
    "steps", "batch_size", "learning_rate", "warmup_steps", "weight_decay", "ema_decay",
    "checkpoint_every", "log_every", "seed", "resume", "output_dir",
)  # fmt: skip
