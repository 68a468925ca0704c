"""Sampling with Wan: sizes of the video, the transformer's inputs and calls, attention plans.

Two keys of Wan 2.2's model_index.json are supported: expand_timesteps, with which the first frame
can be an encoded image at time 0, and boundary_ratio, the share of the times at which the second
transformer replaces the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn.masks import Mask, TeacherForcing
from maxattn_examples.common.pipeline_folder import (
    SECOND,
    boundary_error,
    boundary_of,
    config_of,
    continues_images,
    index_of,
    size_of,
)
from maxattn_examples.common.shapes import Form
from maxattn_examples.sample.task import Arrays, Expert, SamplingTask
from maxattn_examples.sample.torch_parts import video
from maxattn_examples.samplers.sampler import Sampler

from . import experts, torch_parts
from .model import WanTransformer3D
from .settings import Settings, Sizes

TRAINING_TIMES = 1000  # a boundary is a share of them


@dataclass(frozen=True)
class WanSamplingTask(SamplingTask):
    """Sample videos with Wan's transformers."""

    settings: Settings
    sizes: Sizes

    family = "wan"
    sizes_class, model_class = Sizes, WanTransformer3D

    @cached_property
    def continues(self) -> bool:
        """Whether the first frame can be an image, at time 0."""
        return continues_images(index_of(self.folder))

    @cached_property
    def boundary(self) -> float | None:
        """The share of the times above which the first of two transformers computes."""
        return boundary_of(self.folder)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.sizes.num_layers

    @property
    def needs_image(self) -> bool:
        """Whether it is an image-to-video model, with a condition beside the noise."""
        return self.sizes.in_channels > self.sizes.out_channels

    @property
    def takes_image(self) -> bool:
        """Whether a video can start with an image."""
        return self.needs_image or self.continues

    @property
    def needs_torch(self) -> tuple[str, ...]:
        """The parts that encode a prompt, and a required image."""
        states = ("image_encoder", "image_processor") if self.sizes.image_dim is not None else ()
        vae = ("vae",) if self.needs_image else ()
        return ("tokenizer", "text_encoder", *states, *vae)

    @cached_property
    def scale(self) -> tuple[int, int, int]:
        """Frames, rows and columns of pixels per latent; 4, 8 and 8 if the folder has no vae."""
        vae = config_of(self.folder, "vae")
        side = size_of(vae, "scale_factor_spatial", int, 8)
        return (size_of(vae, "scale_factor_temporal", int, 4), side, side)

    @property
    def latents(self) -> tuple[int, ...]:
        """The shape [C, F, h, w] of one video's latents."""
        s, (time, rows, columns) = self.settings.sampling, self.scale
        frames = (s.frames - 1) // time + 1
        return (self.sizes.out_channels, frames, s.height // rows, s.width // columns)

    def sampler(self) -> Sampler:
        """The sampler that pipeline and settings give."""
        return self.settings.sampling.sampler_of(str(self.folder))

    def experts(self, times: Any) -> tuple[Expert, ...]:
        """Split the steps at the pipeline's boundary, if it has one."""
        s, boundary = self.settings.sampling, self.boundary
        if boundary is None:
            return (Expert(self.part, len(times), s.guidance_scale, s.guided),)
        above = int((np.asarray(times) >= boundary * TRAINING_TIMES).sum())
        low = s.guidance_scale if s.guidance_scale_2 is None else s.guidance_scale_2
        # With guidance for the first, diffusers mixes at any scale of the second; 1 adds nothing.
        rest = Expert(SECOND, len(times) - above, low, s.guided and low != 1)
        return Expert(self.part, above, s.guidance_scale, s.guided), rest

    def size_errors(self) -> Iterable[ConfigError]:
        """Yield an error for sizes that tokens do not divide, and for unsupported settings."""
        yield from self._pipeline_errors()
        if "rollout" in self.settings.model_fields_set:
            rule = "it is for streaming, and this command samples all frames at once"
            remedy = "use examples/stream.py; leave it out for a model of whole videos"
            yield ConfigError("rollout", "given", rule, remedy)
        if self.sizes.pos_embed_seq_len is not None:
            rule = "models of a first and last frame need two images, which sampling lacks"
            yield ConfigError("model.folder", self.folder, rule, "give another")
        scales = zip(self.scale, self.sizes.patch_size, strict=True)
        frames, *sides = (scale * patch for scale, patch in scales)
        yield from self.undivided(sides, "it is a multiple of {unit}, the pixels of a token")
        yield from self._frame_errors(frames)

    def _pipeline_errors(self) -> Iterable[ConfigError]:
        boundary, second = self.boundary, self.folder / SECOND
        scale = self.settings.sampling.guidance_scale_2
        yield from experts.name_errors(self.settings.model.sizes, self.folder)
        if (problem := boundary_error(self.folder)) is not None:
            yield problem
        if boundary is None and scale is not None and not second.is_dir():
            rule = "it is the second transformer's, and this pipeline has one"
            yield ConfigError("sampling.guidance_scale_2", scale, rule, "set guidance_scale")
        if boundary is None and self.settings.sampling.fast_2 is not None:
            rule = "it is the second transformer's, and this pipeline has one"
            yield ConfigError("sampling.fast_2", "given", rule, "set fast")
        if scale is not None and scale > 1 and not self.settings.sampling.guided:
            rule = "guidance is for both transformers or for none, and guidance_scale is at most 1"
            remedy = "set guidance_scale too, 1.001 for next to none"
            yield ConfigError("sampling.guidance_scale_2", scale, rule, remedy)
        if boundary is not None and second.is_dir() and Sizes.of_folder(second) != self.sizes:
            rule = "both transformers of a pipeline have the same sizes"
            remedy = "fetch the whole folder anew"
            yield ConfigError("model.folder", f"{second}: {Sizes.of_folder(second)}", rule, remedy)

    def _frame_errors(self, unit: int) -> Iterable[ConfigError]:
        frames = self.settings.sampling.frames
        if (frames - 1) % unit:
            below = (frames - 1) // unit * unit + 1
            rule = f"it must be 1 plus a multiple of {unit}"
            yield ConfigError("sampling.frames", frames, rule, f"use {below} or {below + unit}")

    def expected(self, guided: bool) -> dict[str, Form]:
        """Return the forms of text, condition, image states and (optional) first frame."""
        sizes = self.sizes
        forms: dict[str, Form] = {"text": ("L", sizes.text_dim)}
        if guided:
            forms["negative_text"] = ("L", sizes.text_dim)
        if sizes.image_dim is not None:
            forms["image"] = ("L", sizes.image_dim)
        if self.needs_image:
            forms["condition"] = (sizes.in_channels - sizes.out_channels, *self.latents[1:])
        if self.continues:
            forms["first"] = (sizes.out_channels, 1, *self.latents[2:])
        return forms

    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Encode the prompts, and an image, with the folder's encoders."""
        s = self.settings.sampling
        prompts = {"text": [s.prompt or ""], "negative_text": [s.negative_prompt or ""]}
        arrays = torch_parts.texts(folder, prompts, s.text_tokens, s.torch_device)
        if image is not None:
            size = (s.frames, s.height, s.width)
            arrays |= torch_parts.image(folder, image, size, s.torch_device)
        return arrays

    def told(self, model: Any, arrays: Mapping[str, Array]) -> Any:
        """Compute every block's keys and values of text and image, once for all steps."""
        kv = model.encode(arrays["text"], arrays.get("image"))
        return kv, _last(arrays.get("condition")), _last(arrays.get("first"))

    def predict(
        self,
        model: Any,
        x: Float[Array, "B F H W C"],
        t: Float[Array, " B"],
        told: Any,
    ) -> Array:
        """Predict the velocity, with the condition's channels, or the first frame at time 0."""
        kv, condition, first = told
        x = x if condition is None else jnp.concatenate([x, condition], axis=-1)
        if first is None:
            return model(x, t, kv=kv)
        frames = x.shape[1] // self.sizes.patch_size[0]
        times = jnp.where(jnp.arange(frames) > 0, t[:, None], 0.0)
        return model(_begun(first, x), times, kv=kv)

    def finished(
        self, x: Float[Array, "B F H W C"], told: Mapping[str, Array]
    ) -> Float[Array, "B F H W C"]:
        """Return the sample; the given first frame, if any, replaces its own."""
        first = _last(told.get("first"))
        return x if first is None else _begun(first[-x.shape[0] :], x)

    def plans(self, rows: int, lengths: Mapping[str, int], mesh: Any) -> dict[str, ma.Plan]:
        """Plan self-attention, and cross-attention to text and image."""
        return plans(self.settings, self.sizes, rows, self.latents, lengths, mesh)

    def pixels(self, folder: Path, latents: np.ndarray) -> list[np.ndarray]:
        """Decode latents into videos."""
        return torch_parts.decode(folder, latents, self.settings.sampling.torch_device)

    def write(self, shown: Sequence[np.ndarray], out: Path) -> list[Path]:
        """Write videos."""
        fps = self.settings.sampling.fps
        return [video(frames, out / f"{i:03}", fps) for i, frames in enumerate(shown)]


def _last(x: Float[Array, "B C ..."] | None) -> Float[Array, "B ... C"] | None:
    """Move the channels to the end, in float32."""
    return None if x is None else jnp.moveaxis(jnp.asarray(x, jnp.float32), 1, -1)


def _begun(
    first: Float[Array, "B 1 H W C"], x: Float[Array, "B F H W C"]
) -> Float[Array, "B F H W C"]:
    return jnp.concatenate([first, x[:, 1:]], axis=1)


def tokens(sizes: Sizes, latents: tuple[int, ...]) -> int:
    """Count the patches of a video's latents, [C, F, h, w]."""
    sides = zip(latents[1:], sizes.patch_size, strict=True)
    return math.prod(side // patch for side, patch in sides)


def plans(
    settings: Settings,
    sizes: Sizes,
    batch: int,
    latents: tuple[int, ...],
    lengths: Mapping[str, int],
    mesh: jax.sharding.Mesh | None,
    mask: Mask | None = None,
) -> dict[str, ma.Plan]:
    """Plan self-attention, and cross-attention to text and image.

    Args:
        batch: videos in one model call.
        latents: [C, F, h, w] of one video.
        lengths: tokens of "text", and of "image" if there is one.
        mask: of training by forcing; for teacher forcing, over two clips.
    """
    heads = (sizes.num_attention_heads, sizes.attention_head_dim)

    def states(length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, length, *heads), jnp.dtype(settings.model.dtype))

    video = states(tokens(sizes, latents) * (2 if isinstance(mask, TeacherForcing) else 1))
    calls = {"self": ma.Call.of(video, video, mask)}
    for role, name in (("cross", "text"), ("image", "image")):
        if name in lengths:
            calls[role] = ma.Call.of(video, states(lengths[name]), role="cross")
    return {role: ma.plan(call, settings, mesh) for role, call in calls.items()}
