"""The interface of a model in sampling: how it is built, its inputs, and its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.scan import Around
from maxattn_examples.common.shapes import Form
from maxattn_examples.samplers.sampler import Sampler

Arrays = dict[str, np.ndarray]
Part = Literal["transformer", "unet"]


class Expert(NamedTuple):
    """The steps that a model takes.

    Attributes:
        part: the folder of a pipeline that holds it.
        steps: how many, after those of the expert before.
        guidance_scale: of these steps.
        guided: whether the model is also called with the negative prompt.
    """

    part: str
    steps: int
    guidance_scale: float
    guided: bool


class SamplingTask(Protocol):
    """A model that is sampled. Arrays have the names and layouts of `files.py`."""

    @property
    def family(self) -> Family:
        """The models that it belongs to, which says whose pipelines can be drawn from."""
        ...

    @property
    def part(self) -> Part:
        """The folder of a pipeline that holds the model, and the first word of LoRA's names."""
        ...

    @property
    def needs_torch(self) -> tuple[str, ...]:
        """The parts of a pipeline's folder that encode a prompt; none where torch does nothing."""
        ...

    @property
    def settings(self) -> Any:
        """Those of attention, with the sections `model` and `sampling`."""
        ...

    @property
    def sizes(self) -> Any:
        """Those of the model, under diffusers' names."""
        ...

    @property
    def latents(self) -> tuple[int, ...]:
        """The shape of one sample's latents, channels first."""
        ...

    @property
    def layers(self) -> int:
        """How many layers a model has, which `fast` counts."""
        ...

    @property
    def embedded_guidance(self) -> float | None:
        """The guidance that is an input of the model; None of a model without it."""
        ...

    @property
    def takes_image(self) -> bool:
        """Whether the model can be told an image."""
        ...

    @property
    def needs_image(self) -> bool:
        """Whether it draws nothing without one."""
        ...

    def experts(self, times: Any) -> tuple[Expert, ...]:
        """Return the models that take the steps at these times, which descend: most have one."""
        ...

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> nnx.Module:
        """Build the model; called under `nnx.eval_shape`."""
        ...

    def sampler(self) -> Sampler:
        """Choose the sampler."""
        ...

    def size_errors(self) -> Iterable[ConfigError]:
        """Yield errors of the size of the sample."""
        ...

    def expected(self, guided: bool) -> dict[str, Form]:
        """Return the form of each input array, without the batch."""
        ...

    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Encode the prompts of the settings (and an image) with torch."""
        ...

    def completed(self, arrays: Arrays) -> Arrays:
        """Add what follows from the size of the sample to the arrays of a file."""
        ...

    def told(self, model: Any, arrays: Mapping[str, Array]) -> Any:
        """Compute once what every step needs of the arrays, the batch first or second."""
        ...

    def predict(
        self,
        model: Any,
        x: Float[Array, "B ... C"],
        t: Float[Array, " B"],
        told: Any,
        around: Around | None = None,
    ) -> Array:
        """Call the model on latents, channels last; `around` decides which of its layers run."""
        ...

    def time_states(
        self, weights: Path, times: np.ndarray, which: Literal["embedding", "modulation"]
    ) -> np.ndarray | None:
        """Return what the model makes of each time, from its weights; None if not of it alone."""
        ...

    def finished(
        self, x: Float[Array, "B ... C"], told: Mapping[str, Array]
    ) -> Float[Array, "B ... C"]:
        """Return what is drawn, from the last step's sample and the arrays of its last call."""
        ...

    def plans(self, rows: int, lengths: Mapping[str, int], mesh: Any) -> dict[str, ma.Plan]:
        """Plan the attention of a step of `rows` rows; `lengths` are tokens of text and image."""
        ...

    def pixels(self, folder: Path, latents: np.ndarray) -> list[np.ndarray]:
        """Decode latents, channels second, with torch's VAE into pictures or videos."""
        ...

    def write(self, shown: list[np.ndarray], out: Path) -> list[Path]:
        """Write pictures or videos into a folder; return the files."""
        ...
