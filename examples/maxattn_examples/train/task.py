"""The interface of a model in training: how it is built, its loss, and the cost of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

import maxattn as ma
from maxattn import weights
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import Family, check_pipeline, part_of
from maxattn_examples.common.shapes import Shapes

from .data import LatentFolder, Source

Arrays = dict[str, Array]


class Fixed(NamedTuple):
    """The settings that must equal the checkpoint's when a run continues."""

    keys: tuple[str, ...]  # prefixes of dotted keys
    free: tuple[str, ...] = ()  # exceptions, which may change


# A run resumes only if these are unchanged; everything else may change between runs.
KEPT = Fixed(
    (
        "model",
        "training.batch_size",
        "training.seed",
        "training.lora_rank",
        "training.lora_targets",
        "training.moment_dtype",
        "training.max_grad_norm",
        "training.ema_decay",
    ),
    ("model.folder", "model.shapes"),
)


class Examples(Source, Protocol):
    """Examples by index, with a description of the data set."""

    note: str  # printed before training; may be empty
    kind: str  # "digits", or empty
    model: str  # the latents' model

    @property
    def shapes(self) -> Shapes:
        """The shapes of an example's arrays."""
        ...

    @property
    def empty(self) -> dict[str, np.ndarray]:
        """The conditions of the empty text, without a batch axis."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash that differs between data sets."""
        ...


class Task(Protocol):
    """A model in training. A batch is a dict of arrays, batch first, by the names of its source.

    `settings`, `source`, `build`, `noised` and `loss` have no default.
    """

    fixed: ClassVar[Fixed] = KEPT
    settings: Any  # an AttentionConfig with a section `training`; `sampling` if samples are drawn
    sizes: Any = None  # their `config()` is exported as config.json

    def source(self) -> Examples:
        """Open the data.

        Raises:
            ConfigErrors: it is missing or incomplete.
        """
        ...

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> nnx.Module:
        """Build the model; also called under `nnx.eval_shape` and `jax.jit`."""
        ...

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Draw times and noise for a batch; return the arrays that `loss` needs, batch first.

        Args:
            batch: clean examples.
            empty: the conditions of the empty text, without a batch axis.
            key: new in each step.
        """
        ...

    def loss(self, model: Any, examples: Arrays) -> Float[Array, ""]:
        """Return the mean loss of some batch rows of what `noised` returned."""
        ...

    @property
    def training(self) -> Any:
        """The section `training`, a `TrainingSettings`."""
        return self.settings.training

    def load(self, model: nnx.Module, mesh: jax.sharding.Mesh | None) -> bool:
        """Load weights into a model without arrays; False if it starts from random ones."""
        return False

    def shape_errors(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield an error for each array of the data that the model cannot take, or lacks."""
        return ()

    def plans(self, shapes: Shapes, mesh: jax.sharding.Mesh | None) -> dict[str, ma.Plan]:
        """Plan the attention of a training step, by role; plans are printed and saved."""
        return {}

    def tokens(self, shapes: Shapes) -> int:
        """Count the tokens of an example, for tokens per second."""
        return 0

    @property
    def part(self) -> str:
        """The name of the exported folder, as in a pipeline."""
        return "model"

    @property
    def folder(self) -> Path | None:
        """The folder of the initial weights; None for random ones."""
        return None

    @property
    def frames_per_block(self) -> int | None:
        """The frames of a block; None if every frame attends to all others."""
        return None

    @property
    def sampler(self) -> Any:
        """The sampler of samples; None if none are drawn or exported."""
        return None

    def sampling_task(self) -> Any:
        """Return the `SamplingTask` that calls the model for samples, or None."""
        return None


@dataclass(frozen=True)
class LatentTask(Task):
    """A `Task` whose examples are latents and whose weights are in diffusers' format."""

    settings: Any
    sizes: Any

    family: ClassVar[Family]
    sizes_class: ClassVar[Any]
    model_class: ClassVar[Any]
    sampling_class: ClassVar[Any]
    folder_of_model: ClassVar[str] = "transformer"

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Make the task; its sizes come from the settings, or from the model's folder.

        Raises:
            ConfigErrors: the folder is another pipeline's, or has other sizes.
        """
        check_pipeline(settings.model.folder, cls.family)
        return cls(settings, settings.model.found(cls.sizes_class, cls.folder_of_model))

    @property
    def part(self) -> str:
        """The model's folder in a pipeline's."""
        return self.folder_of_model

    @property
    def folder(self) -> Path | None:
        """The folder of the initial weights."""
        folder = self.settings.model.folder
        return None if folder is None else part_of(folder, self.part)

    @property
    def sampler(self) -> Any:
        """The sampler of samples."""
        return self.settings.sampling.sampler_of(self.settings.model.folder)

    @property
    def examples_at_once(self) -> int:
        """The number of examples in one model call: a batch, or a part of it."""
        return self.training.batch_size // self.training.gradient_accumulation_steps

    def source(self) -> LatentFolder:
        """Open the folder of latents."""
        return LatentFolder(self.settings.data.folder)

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> nnx.Module:
        """Build the model with the dtypes of the settings."""
        model = self.settings.model
        how: dict[str, Any] = {"scan_layers": model.scan_layers is not False, "rngs": rngs}
        how |= {"dtype": jnp.dtype(model.dtype), "param_dtype": jnp.dtype(model.param_dtype)}
        return self.model_class(self.sizes, self.settings, mesh, **how)

    def load(self, model: nnx.Module, mesh: jax.sharding.Mesh | None) -> bool:
        """Read the weights of `model.folder`, if it is set."""
        if self.folder is None:
            return False
        weights.load_diffusers(model, self.folder, mesh=mesh)
        return True

    def sampling_task(self) -> Any:
        """Return the task that calls the model for samples."""
        return self.sampling_class(self.settings, self.sizes, Path())


def replaced(
    x: Float[Array, "B ..."], empty: Float[Array, "..."], dropped: Bool[Array, " B"]
) -> Float[Array, "B ..."]:
    """Replace the conditions of dropped examples by the empty one."""
    return jnp.where(dropped.reshape(-1, *(1,) * empty.ndim), empty.astype(x.dtype), x)
