"""SDXL in sampling: sizes of the picture, the UNet's inputs, and its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn_examples.common.scan import Around, scan_here
from maxattn_examples.common.shapes import Form
from maxattn_examples.sample.picture_task import PictureTask
from maxattn_examples.sample.task import Arrays
from maxattn_examples.samplers.sampler import Sampler

from . import torch_parts
from .plans import plans
from .settings import Settings, sizes_of
from .sizes import Sizes
from .unet import UNet


@dataclass(frozen=True)
class SdxlSamplingTask(PictureTask):
    """Draw pictures with an SDXL UNet.

    Args:
        settings: of everything.
        sizes: of the model.
        folder: the pipeline's; its vae says how many pixels a latent stands for, 8 without one.
    """

    settings: Settings
    sizes: Sizes

    part: Literal["unet"] = "unet"
    family: Literal["sdxl"] = "sdxl"

    @classmethod
    def of(cls, settings: Settings, folder: Path) -> Self:
        """Take the sizes from the settings, or from the model's folder; raises as `sizes_of`."""
        return cls(settings, sizes_of(settings.model), folder)

    @property
    def layers(self) -> int:
        """One: all but the outermost residual blocks."""
        return 1

    @property
    def latents(self) -> tuple[int, ...]:
        """[C, h, w] of one picture."""
        return (self.sizes.in_channels, *self.sides())

    def sampler(self) -> Sampler:
        """Choose the sampler, as the pipeline and the settings say.

        Raises:
            ConfigError: the pipeline's model predicts something else than the settings say.
        """
        asked = self.settings.model.prediction_type
        sampler = self.settings.sampling.sampler_of(str(self.folder), asked)
        prediction = sampler.options["prediction_type"]
        if asked not in (None, prediction):
            rule = f"the sampler of {self.folder} is for a UNet that predicts {prediction}"
            remedy = f"set model.prediction_type={prediction}"
            raise ConfigError("model.prediction_type", asked, rule, remedy)
        return sampler

    def size_errors(self) -> Iterable[ConfigError]:
        """Yield heights and widths that cannot be halved as often as the UNet does."""
        halvings = len(self.sizes.block_out_channels) - 1
        return self.undivided(2**halvings, "it is a multiple of {unit}: each level halves it")

    def expected(self, guided: bool) -> dict[str, Form]:
        """Return text and pooled text."""
        sizes = self.sizes
        forms: dict[str, Form] = {"text": ("L", sizes.cross_attention_dim)}
        forms["pooled"] = (sizes.pooled_dim,)
        negative = {f"negative_{name}": form for name, form in forms.items()}
        return forms | negative if guided else forms

    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Encode the prompts with the folder's two encoders."""
        s = self.settings.sampling
        return torch_parts.texts(folder, [s.prompt or ""], s.negative_prompt, s.torch_device)

    def completed(self, arrays: Arrays) -> Arrays:
        """Add the sizes of an uncropped picture, where a file does not hold them."""
        s = self.settings.sampling
        drawn = np.array([[s.height, s.width, 0, 0, s.height, s.width]], np.float32)
        return {"time_ids": drawn, **arrays}

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> UNet:
        """Build the UNet."""
        model, kept = self.settings.model, self.settings.sampling.weights_dtype
        how: dict[str, Any] = {"scan_layers": scan_here(model.scan_layers), "rngs": rngs}
        how |= {"dtype": jnp.dtype(model.dtype), "param_dtype": jnp.dtype(kept)}
        return UNet(self.sizes, self.settings, mesh, **how)

    def told(self, model: Any, arrays: Mapping[str, Array]) -> Any:
        """Compute the keys and values of the text for every attention, once for all steps."""
        picture = arrays["time_ids"].astype(jnp.float32)
        return model.encode(arrays["text"]), arrays["pooled"], picture

    def predict(
        self,
        model: Any,
        x: Float[Array, "B H W C"],
        t: Float[Array, " B"],
        told: Any,
        around: Around | None = None,
    ) -> Array:
        """Predict the noise, or v."""
        kv, pooled, picture = told
        return model(x, t, None, pooled, picture, kv, around)

    def plans(self, rows: int, lengths: Mapping[str, int], mesh: Any) -> dict[str, ma.Plan]:
        """Plan self- and cross-attention of every resolution that attends."""
        return plans(self.settings, self.sizes, rows, self.latents, lengths["text"], mesh)
