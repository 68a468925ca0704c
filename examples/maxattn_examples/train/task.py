"""The interface of a model in training: how it is built, its loss, and the cost of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

import maxattn as ma
from maxattn import weights
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import part_of
from maxattn_examples.common.shapes import Shapes

from .data import Source
from .latents import LatentFolder
from .settings import TrainingSettings

Arrays = dict[str, Array]


class Fixed(NamedTuple):
    """The settings that a checkpoint cannot go on without.

    Args:
        keys: beginnings of dotted keys.
        free: those among them that may change all the same.
    """

    keys: tuple[str, ...]
    free: tuple[str, ...] = ()


class Examples(Source, Protocol):
    """Examples by index, described before one is read."""

    @property
    def shapes(self) -> Shapes:
        """The shapes of an example's arrays."""
        ...

    @property
    def empty(self) -> dict[str, np.ndarray]:
        """The conditions of the empty text, without a batch axis."""
        ...

    note: str
    """A note on the data for the user before training, or nothing."""
    kind: str
    """Their contents, "digits" or nothing."""
    model: str
    """The model that they are for."""

    @property
    def fingerprint(self) -> str:
        """What tells this data from other data."""
        ...


class Task(Protocol):
    """A model that is trained. A batch is a dict of arrays, named as in latents.py, batch first."""

    @property
    def settings(self) -> Any:
        """The settings of everything."""
        ...

    @property
    def training(self) -> TrainingSettings:
        """How it is trained."""
        ...

    fixed: ClassVar[Fixed]
    """What may not change between the runs of one training."""

    def source(self) -> Examples:
        """Open the data.

        Raises:
            ConfigErrors: it is not there, or not whole.
        """
        ...

    @property
    def part(self) -> str:
        """The folder of a pipeline that holds the model."""
        ...

    @property
    def sizes(self) -> Any:
        """The model's, whose `config()` is what diffusers keeps beside weights."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder of weights, in diffusers' format, that training begins from; None: random."""
        ...

    @property
    def frames_per_block(self) -> int | None:
        """Frames that the model learns to make together; None where all see each other."""
        ...

    @property
    def sampler(self) -> Any:
        """The `Sampler` of samples; None where none are drawn or exported."""
        ...

    def sampling_task(self) -> Any:
        """Return what calls the model in sampling, by `told(model, arrays)` and `predict(...)`."""
        ...

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> nnx.Module:
        """Build the model. It is called under `nnx.eval_shape` or `jax.jit` as well."""
        ...

    def load(self, model: nnx.Module, mesh: jax.sharding.Mesh | None) -> bool:
        """Put weights into a model without arrays; False where there are none to begin from."""
        ...

    def shape_errors(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield one error for each array of the data that the model cannot take, or lacks."""
        ...

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Draw times and noise for a batch; return what `loss` needs of each example, batch first.

        Args:
            batch: clean examples.
            empty: the conditions of the empty text, without a batch axis.
            key: of all that is drawn.
        """
        ...

    def loss(self, model: Any, examples: Arrays) -> Float[Array, ""]:
        """Measure how far the prediction is off, averaged over some of what `noised` gave."""
        ...

    def plans(self, shapes: Shapes, mesh: jax.sharding.Mesh | None) -> dict[str, ma.Plan]:
        """Plan the attention of a training step, as the model will call it."""
        ...

    def tokens(self, shapes: Shapes) -> int:
        """Count the tokens of an example."""
        ...


def replaced(
    x: Float[Array, "B ..."], empty: Float[Array, "..."], dropped: Bool[Array, " B"]
) -> Float[Array, "B ..."]:
    """Put the empty condition in place of those that are dropped."""
    return jnp.where(dropped.reshape(-1, *(1,) * empty.ndim), empty.astype(x.dtype), x)


# A checkpoint goes on only with these as they were; everything else may change between runs.
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


@dataclass(frozen=True)
class LatentTask:
    """Begin a `Task` whose examples are latents and whose weights have diffusers' format.

    Args:
        settings: of everything.
        sizes: of the model; `of(settings)` of a subclass finds them.
    """

    settings: Any
    sizes: Any

    fixed: ClassVar[Fixed] = KEPT

    @property
    def part(self) -> str:
        """The folder of a pipeline that holds the model."""
        raise NotImplementedError(f"{type(self).__name__} says its part")

    @property
    def training(self) -> Any:
        """How it is trained."""
        return self.settings.training

    @property
    def folder(self) -> Path | None:
        """Where the weights are that training begins from."""
        folder = self.settings.model.folder
        return None if folder is None else part_of(folder, self.part)

    @property
    def frames_per_block(self) -> int | None:
        """Frames that the model learns to make together: none, except by forcing."""
        return None

    @property
    def examples_at_once(self) -> int:
        """The examples of one call of the model: a batch, or a part of it."""
        return self.training.batch_size // self.training.gradient_accumulation_steps

    def source(self) -> LatentFolder:
        """Open the folder of latents."""
        return LatentFolder(self.settings.data.folder)

    def load(self, model: nnx.Module, mesh: jax.sharding.Mesh | None) -> bool:
        """Read the weights of `model.folder`, where there is one."""
        if self.folder is None:
            return False
        weights.load_diffusers(model, self.folder, mesh=mesh)
        return True
