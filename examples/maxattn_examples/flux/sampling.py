"""Sampling with Flux.1: picture size, encoders, the transformer's inputs, attention plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn_examples.common.shapes import Form
from maxattn_examples.sample.task import Arrays, PictureTask
from maxattn_examples.sample.torch_parts import TextEncoder, negated, to_numpy
from maxattn_examples.samplers.sampler import Sampler

from .model import FluxTransformer2D
from .settings import GUIDANCE, PATCH, Settings, Sizes


@dataclass(frozen=True)
class FluxSamplingTask(PictureTask):
    """Sample pictures with a Flux.1 transformer."""

    settings: Settings
    sizes: Sizes

    family = "flux"
    sizes_class, model_class = Sizes, FluxTransformer2D

    @property
    def layers(self) -> int:
        """The number of layers, double and single ones."""
        return self.sizes.num_layers + self.sizes.num_single_layers

    @property
    def embedded_guidance(self) -> float | None:
        """The guidance input of FLUX.1-dev; None for schnell, which has no such input."""
        scale = self.settings.sampling.guidance_scale
        usual = GUIDANCE if scale is None else scale
        return usual if self.sizes.guidance_embeds else None

    @property
    def latents(self) -> tuple[int, ...]:
        """The shape [C, h, w] of one picture's latents."""
        return (self.sizes.channels, *self.sides())

    def sampler(self) -> Sampler:
        """The sampler that pipeline, picture size and settings give."""
        sampling, count = self.settings.sampling, tokens(self.latents)
        return sampling.sampler_of(str(self.folder), self.sizes, count)

    def size_errors(self) -> Iterable[ConfigError]:
        """Yield an error for sides that tokens do not divide, and for an unused guidance."""
        units = (self.scale * PATCH,) * 2
        yield from self.undivided(units, "it is a multiple of {unit}, the pixels of a token")
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
        """Return the forms of text and pooled text."""
        sizes = self.sizes
        return self.texts(sizes.joint_attention_dim, sizes.pooled_projection_dim, guided)

    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Encode the prompts with the folder's two encoders."""
        s = self.settings.sampling
        prompts = [s.prompt or ""]
        return encode(folder, prompts, s.negative_prompt, s.text_tokens, s.torch_device)

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
    ) -> Array:
        """Predict the velocity."""
        return model(x, t, *told)

    def plans(self, rows: int, lengths: Mapping[str, int], mesh: Any) -> dict[str, ma.Plan]:
        """Plan the joint attention of text and picture."""
        return plans(self.settings, self.sizes, rows, self.latents, lengths["text"], mesh)


def tokens(latents: tuple[int, ...]) -> int:
    """Count the patches of a picture's latents, [C, h, w]."""
    _, height, width = latents
    return (height // PATCH) * (width // PATCH)


def plans(
    settings: Settings,
    sizes: Sizes,
    batch: int,
    latents: tuple[int, ...],
    text: int,
    mesh: jax.sharding.Mesh | None,
) -> dict[str, ma.Plan]:
    """Plan the joint attention of text and picture, the same in every block, for training too.

    Args:
        batch: pictures in one model call.
        latents: [C, h, w] of one picture.
        text: tokens of a prompt.
    """
    heads = (sizes.num_attention_heads, sizes.attention_head_dim)
    shape = (batch, text + tokens(latents), *heads)
    both = jax.ShapeDtypeStruct(shape, jnp.dtype(settings.model.dtype))
    return {"joint": ma.plan(ma.Call.of(both, both), settings, mesh)}


def encode(
    folder: Path, prompts: Sequence[str], negative_prompt: str | None, tokens: int, device: str
) -> Arrays:
    """Encode prompts and the negative one: text, pooled, negative_text and negative_pooled.

    Padding is attended to, as in the model's training.

    Args:
        folder: with tokenizer, text_encoder (CLIP), tokenizer_2 and text_encoder_2 (T5).
        negative_prompt: None is the empty prompt.
        tokens: length for T5, to which prompts are padded or cut; CLIP's tokenizer has its own.
        device: cpu or cuda.
    """
    every = [*prompts, negative_prompt or ""]
    clip = TextEncoder(folder, "CLIPTextModel", device)
    pooled = to_numpy(clip(clip.tokens(every).input_ids).pooler_output)
    del clip  # a device may have room for one
    t5 = TextEncoder(folder, "T5EncoderModel", device, "_2")
    text = to_numpy(t5(t5.tokens(every, tokens).input_ids).last_hidden_state)
    return negated({"text": text, "pooled": pooled})
