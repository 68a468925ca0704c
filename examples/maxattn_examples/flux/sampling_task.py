"""Flux.1 in sampling: sizes of the picture, the transformer's inputs, and its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
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
from .model import FluxTransformer2D
from .plans import plans, tokens
from .settings import GUIDANCE, Settings, sizes_of
from .sizes import PATCH, Sizes


@dataclass(frozen=True)
class FluxSamplingTask(PictureTask):
    """Draw pictures with a Flux.1 transformer.

    Args:
        settings: of everything.
        sizes: of the model.
        folder: the pipeline's; its vae says how many pixels a latent stands for, 8 without one.
    """

    settings: Settings
    sizes: Sizes

    part: Literal["transformer"] = "transformer"
    family: Literal["flux"] = "flux"

    @classmethod
    def of(cls, settings: Settings, folder: Path) -> Self:
        """Take the sizes from the settings, or from the model's folder; raises as `sizes_of`."""
        return cls(settings, sizes_of(settings.model), folder)

    @property
    def layers(self) -> int:
        """How many layers the transformer has, double and single ones."""
        return self.sizes.num_layers + self.sizes.num_single_layers

    @property
    def embedded_guidance(self) -> float | None:
        """The guidance that FLUX.1-dev is told; None of schnell, which is told none."""
        scale = self.settings.sampling.guidance_scale
        usual = GUIDANCE if scale is None else scale
        return usual if self.sizes.guidance_embeds else None

    @property
    def latents(self) -> tuple[int, ...]:
        """[C, h, w] of one picture."""
        return (self.sizes.channels, *self.sides())

    def sampler(self) -> Sampler:
        """Choose the sampler, as the pipeline, the size of the picture and the settings say."""
        sampling, count = self.settings.sampling, tokens(self.latents)
        return sampling.sampler_of(str(self.folder), self.sizes, count)

    def size_errors(self) -> Iterable[ConfigError]:
        """Yield sides that tokens do not divide, and a guidance that the model is not told."""
        yield from self.undivided(PATCH, "it is a multiple of {unit}, the pixels of a token")
        yield from self._guidance_errors()

    def _guidance_errors(self) -> Iterator[ConfigError]:
        scale, row = self.settings.sampling.guidance_scale, self.settings.sampling.distilled_as
        told, embeds = row is not None and row.embedded is not None, self.sizes.guidance_embeds
        if row is not None and told != embeds:
            ours = "a guidance, as FLUX.1-dev" if embeds else "no guidance, as FLUX.1-schnell"
            rule = f"this model is told {ours}, and the name is of {row.of}"
            remedy = f"give FLUX.1-{'dev' if told else 'schnell'} as --model, or leave it out"
            yield ConfigError("sampling.distilled", row.name, rule, remedy)
        elif scale is not None and not embeds:
            rule = "models with guidance_embeds take it, such as FLUX.1-dev, and this has none"
            remedy = "set it to null; classifier-free guidance is true_cfg_scale"
            yield ConfigError("sampling.guidance_scale", scale, rule, remedy)

    def expected(self, guided: bool) -> dict[str, Form]:
        """Return text and pooled text."""
        forms: dict[str, Form] = {"text": ("L", self.sizes.joint_attention_dim)}
        forms["pooled"] = (self.sizes.pooled_projection_dim,)
        negative = {f"negative_{name}": form for name, form in forms.items()}
        return forms | negative if guided else forms

    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Encode the prompts with the folder's two encoders."""
        s = self.settings.sampling
        prompts = [s.prompt or ""]
        return torch_parts.texts(folder, prompts, s.negative_prompt, s.text_tokens, s.torch_device)

    def build(self, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> FluxTransformer2D:
        """Build the transformer."""
        model, kept = self.settings.model, self.settings.sampling.weights_dtype
        how: dict[str, Any] = {"scan_layers": scan_here(model.scan_layers), "rngs": rngs}
        how |= {"dtype": jnp.dtype(model.dtype), "param_dtype": jnp.dtype(kept)}
        return FluxTransformer2D(self.sizes, self.settings, mesh, **how)

    def told(self, model: Any, arrays: Mapping[str, Array]) -> Any:
        """Return the inputs of every step: the text, the pooled text and the guidance."""
        text, pooled, scale = arrays["text"], arrays["pooled"], self.embedded_guidance
        return text, pooled, None if scale is None else jnp.full(len(text), scale)

    def predict(
        self,
        model: Any,
        x: Float[Array, "B H W C"],
        t: Float[Array, " B"],
        told: Any,
        around: Around | None = None,
    ) -> Array:
        """Predict the velocity."""
        return model(x, t, *told, around=around)

    def plans(self, rows: int, lengths: Mapping[str, int], mesh: Any) -> dict[str, ma.Plan]:
        """Plan the attention of text and picture together."""
        return plans(self.settings, self.sizes, rows, self.latents, lengths["text"], mesh)
