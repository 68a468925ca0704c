"""A model in sampling: how it is built and called, its inputs, and the decoding of its samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn_examples.common.compiled import scan_here
from maxattn_examples.common.pipeline_folder import Family, config_of, size_of
from maxattn_examples.common.shapes import Form
from maxattn_examples.samplers.sampler import Sampler

from .torch_parts import picture, pictures

Arrays = dict[str, np.ndarray]
Part = Literal["transformer", "unet"]


class Expert(NamedTuple):
    """The steps of one model.

    Attributes:
        part: the model's folder in a pipeline's.
        steps: number of steps, after those of the expert before.
        guided: whether the model is also called with the negative prompt.
    """

    part: str
    steps: int
    guidance_scale: float
    guided: bool


@dataclass(frozen=True)
class SamplingTask(ABC):
    """A model that is sampled. Arrays have the names and layouts of `inputs.py`.

    Args:
        settings: of attention, with the sections `model` and `sampling`.
        sizes: of the model, under diffusers' names.
        folder: the pipeline's; its vae gives the pixels per latent.
    """

    settings: Any
    sizes: Any
    folder: Path

    family: ClassVar[Family]
    """The models that it belongs to, which says whose pipelines can be drawn from."""
    part: ClassVar[Part] = "transformer"
    """The folder of a pipeline that holds the model, and the first word of LoRA's names."""
    sizes_class: ClassVar[Any]
    model_class: ClassVar[Any]
    """Called as `model_class(sizes, settings, mesh, ...)`."""

    @classmethod
    def of(cls, settings: Any, folder: Path) -> Self:
        """Make the task; its sizes come from the settings, or from the model's folder.

        Raises:
            ConfigError, WeightsError: as `SizedModel.found`.
        """
        return cls(settings, settings.model.found(cls.sizes_class, cls.part), folder)

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> Any:
        """Build the model; called under `nnx.eval_shape`."""
        model, kept = self.settings.model, self.settings.sampling.weights_dtype
        how: dict[str, Any] = {"scan_layers": scan_here(model.scan_layers), "rngs": rngs}
        how |= {"dtype": jnp.dtype(model.dtype), "param_dtype": jnp.dtype(kept)}
        return self.model_class(self.sizes, self.settings, mesh, **how)

    # ---- what a family says of itself ------------------------------------------------------------

    @property
    @abstractmethod
    def layers(self) -> int:
        """The number of layers that steps may reuse or skip."""

    @property
    @abstractmethod
    def latents(self) -> tuple[int, ...]:
        """The shape of one sample's latents, channels first."""

    @property
    @abstractmethod
    def needs_torch(self) -> tuple[str, ...]:
        """The parts of a pipeline's folder that encode a prompt with torch; empty if none do."""

    @abstractmethod
    def sampler(self) -> Sampler:
        """The sampler that pipeline and settings give."""

    @abstractmethod
    def size_errors(self) -> Iterable[ConfigError]:
        """Yield an error for each size that the model cannot sample."""

    @abstractmethod
    def expected(self, guided: bool) -> dict[str, Form]:
        """Return the form of each input array, without the batch."""

    @abstractmethod
    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Encode the prompts of the settings (and an image) with torch."""

    @abstractmethod
    def told(self, model: Any, arrays: Mapping[str, Array]) -> Any:
        """Compute the inputs that all steps share; the batch is their first or second axis."""

    @abstractmethod
    def predict(
        self,
        model: Any,
        x: Float[Array, "B ... C"],
        t: Float[Array, " B"],
        told: Any,
    ) -> Array:
        """Call the model on latents, channels last."""

    @abstractmethod
    def plans(self, rows: int, lengths: Mapping[str, int], mesh: Any) -> dict[str, ma.Plan]:
        """Plan the attention of a step; `lengths` are the tokens of text and image."""

    @abstractmethod
    def pixels(self, folder: Path, latents: np.ndarray) -> list[np.ndarray]:
        """Decode latents, channels second, with torch's VAE into pictures or videos."""

    @abstractmethod
    def write(self, shown: Sequence[np.ndarray], out: Path) -> list[Path]:
        """Write pictures or videos into a folder; return the files."""

    # ---- what most families share ----------------------------------------------------------------

    @property
    def embedded_guidance(self) -> float | None:
        """The guidance that is an input of the model, or None."""
        return None

    @property
    def takes_image(self) -> bool:
        """Whether the model accepts an image."""
        return False

    @property
    def needs_image(self) -> bool:
        """Whether the model requires an image."""
        return False

    def experts(self, times: Any) -> tuple[Expert, ...]:
        """Return the models that compute the steps at these descending times."""
        sampling = self.settings.sampling
        return (Expert(self.part, len(times), sampling.cfg_scale, sampling.guided),)

    def completed(self, arrays: Arrays) -> Arrays:
        """Add the arrays that follow from the size of the sample."""
        return arrays

    def finished(
        self, x: Float[Array, "B ... C"], told: Mapping[str, Array]
    ) -> Float[Array, "B ... C"]:
        """Return the final sample, from the last step's sample and its conditions."""
        return x

    def undivided(self, units: Sequence[int], rule: str) -> Iterator[ConfigError]:
        """Yield an error for a height or width that is not a multiple of its unit.

        Args:
            units: pixels along a column and along a row.
            rule: text with {unit}, for the error.
        """
        for key, unit in zip(("height", "width"), units, strict=True):
            if (value := getattr(self.settings.sampling, key)) % unit:
                near = f"use {max(unit, value // unit * unit)} or {(value // unit + 1) * unit}"
                yield ConfigError(f"sampling.{key}", value, rule.format(unit=unit), near)


class PictureTask(SamplingTask):
    """A model of pictures, conditioned on a text and a pooled text."""

    @property
    def needs_torch(self) -> tuple[str, ...]:
        """The folders of both text encoders."""
        return ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")

    @cached_property
    def scale(self) -> int:
        """Pixels along a side per latent; 8 if the folder has no vae."""
        vae = config_of(self.folder, "vae")
        return 2 ** (len(size_of(vae, "block_out_channels", tuple[int, ...], (1,) * 4)) - 1)

    def sides(self) -> tuple[int, int]:
        """The rows and columns of the latents."""
        s = self.settings.sampling
        return s.height // self.scale, s.width // self.scale

    def texts(self, text: int, pooled: int, guided: bool) -> dict[str, Form]:
        """Return the forms of text and pooled text with these widths."""
        forms: dict[str, Form] = {"text": ("L", text), "pooled": (pooled,)}
        negative = {f"negative_{name}": form for name, form in forms.items()}
        return forms | negative if guided else forms

    def pixels(self, folder: Path, latents: np.ndarray) -> list[np.ndarray]:
        """Decode latents into pictures."""
        return pictures(folder, latents, self.settings.sampling.torch_device)

    def write(self, shown: Sequence[np.ndarray], out: Path) -> list[Path]:
        """Write pictures."""
        return [picture(pixels, out / f"{i:03}.png") for i, pixels in enumerate(shown)]
