"""Sampling with SDXL: picture size, text encoders, the UNet's inputs, attention plans."""

# torch is optional: types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import index_of
from maxattn_examples.common.shapes import Form
from maxattn_examples.sample.task import Arrays, PictureTask
from maxattn_examples.sample.torch_parts import TextEncoder, negated, to_numpy
from maxattn_examples.samplers.sampler import Sampler

from .settings import Settings, Sizes
from .unet import UNet


@dataclass(frozen=True)
class SdxlSamplingTask(PictureTask):
    """Sample pictures with an SDXL UNet."""

    settings: Settings
    sizes: Sizes

    family = "sdxl"
    part = "unet"
    sizes_class, model_class = Sizes, UNet

    @property
    def layers(self) -> int:
        """The number of layers that a step can reuse: all inner blocks count as one."""
        return 1

    @property
    def latents(self) -> tuple[int, ...]:
        """The shape [C, h, w] of one picture's latents."""
        return (self.sizes.in_channels, *self.sides())

    def sampler(self) -> Sampler:
        """The sampler that pipeline and settings give.

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
        """Yield an error for a height or width that the UNet cannot halve at every level."""
        unit = self.scale * 2 ** (len(self.sizes.block_out_channels) - 1)
        return self.undivided((unit, unit), "it is a multiple of {unit}: each level halves it")

    def expected(self, guided: bool) -> dict[str, Form]:
        """Return the forms of text and pooled text."""
        return self.texts(self.sizes.cross_attention_dim, self.sizes.pooled_dim, guided)

    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Encode the prompts with the folder's two encoders."""
        s = self.settings.sampling
        return encode(folder, [s.prompt or ""], s.negative_prompt, s.torch_device)

    def completed(self, arrays: Arrays) -> Arrays:
        """Add the sizes of an uncropped picture if the arrays lack them."""
        s = self.settings.sampling
        drawn = np.array([[s.height, s.width, 0, 0, s.height, s.width]], np.float32)
        return {"time_ids": drawn, **arrays}

    def told(self, model: Any, arrays: Mapping[str, Array]) -> Any:
        """Return the inputs of every step, with the text's keys and values computed once."""
        picture = arrays["time_ids"].astype(jnp.float32)
        return model.encode(arrays["text"]), arrays["pooled"], picture

    def predict(
        self,
        model: Any,
        x: Float[Array, "B H W C"],
        t: Float[Array, " B"],
        told: Any,
    ) -> Array:
        """Predict the noise, or v."""
        kv, pooled, picture = told
        return model(x, t, None, pooled, picture, kv)

    def plans(self, rows: int, lengths: Mapping[str, int], mesh: Any) -> dict[str, ma.Plan]:
        """Plan self- and cross-attention at every resolution that has attention."""
        return plans(self.settings, self.sizes, rows, self.latents, lengths["text"], mesh)


def plans(
    settings: Settings,
    sizes: Sizes,
    batch: int,
    latents: tuple[int, ...],
    text: int,
    mesh: jax.sharding.Mesh | None,
) -> dict[str, ma.Plan]:
    """Plan self- and cross-attention at every resolution that has attention, for training too.

    Args:
        batch: pictures in one UNet call.
        latents: [C, h, w] of one picture.
        text: tokens of a prompt.
    """
    found: dict[str, ma.Plan] = {}
    for level, heads in enumerate(sizes.attention_head_dim):
        if not sizes.attends[level]:
            continue
        height, width = (side >> level for side in latents[1:])
        per_head = (heads, sizes.block_out_channels[level] // heads)
        x, states = (
            jax.ShapeDtypeStruct((batch, n, *per_head), jnp.dtype(settings.model.dtype))
            for n in (height * width, text)
        )
        calls = {"self": ma.Call.of(x, x), "cross": ma.Call.of(x, states, role="cross")}
        for role, call in calls.items():
            found[f"{role} {height}x{width}"] = ma.plan(call, settings, mesh)
    return found


def encode(
    folder: Path, prompts: Sequence[str], negative_prompt: str | None, device: str
) -> Arrays:
    """Encode prompts and the negative one: text, pooled, negative_text and negative_pooled.

    Args:
        folder: with tokenizer, text_encoder, tokenizer_2 and text_encoder_2.
        negative_prompt: None is zeros if the pipeline sets force_zeros_for_empty_prompt, else the
            empty prompt.
        device: cpu or cuda.
    """
    import torch

    every, texts, pooled = [*prompts, negative_prompt or ""], [], np.zeros(0)
    for which, kind in (("", "CLIPTextModel"), ("_2", "CLIPTextModelWithProjection")):
        encoder = TextEncoder(folder, kind, device, which, torch.float32)
        said = encoder(encoder.tokens(every).input_ids, output_hidden_states=True)
        texts.append(to_numpy(said.hidden_states[-2]))
        pooled = to_numpy(said[0])  # of the second encoder
    text = np.concatenate(texts, -1)
    if negative_prompt is None and index_of(folder).get("force_zeros_for_empty_prompt", True):
        text[-1], pooled[-1] = 0.0, 0.0
    return negated({"text": text, "pooled": pooled})
