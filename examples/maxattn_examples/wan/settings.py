"""The sizes of Wan 2.1 and 2.2, and their settings: attention's, and five sections.

The same YAML file trains (examples/train.py wan) and samples (examples/generate.py wan).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Lt

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import KEY, Family, checked, read_config
from maxattn_examples.common.settings import Count, NamedModel, Positive, RolloutSettings
from maxattn_examples.sample.scheduler import read
from maxattn_examples.sample.settings import FastSettings, FlowSampling
from maxattn_examples.samplers import Schedule
from maxattn_examples.samplers.sampler import Sampler
from maxattn_examples.train.settings import DataSettings, ForcedTraining

CLASS_NAME = "WanTransformer3DModel"
# What diffusers' transformer could be beside Wan 2.1 and 2.2.
ONLY = {
    "_class_name": CLASS_NAME,
    "qk_norm": "rms_norm_across_heads",
    "cross_attn_norm": True,
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer, under diffusers' names.

    Args:
        num_attention_heads, attention_head_dim: N and H; the width D is their product.
        num_layers: blocks.
        ffn_dim: width inside the feed-forward layer.
        in_channels, out_channels: of the latent video; image-to-video models have more input
            channels.
        patch_size: frames, rows and columns of latents in a token.
        text_dim: width of the text encoder's states.
        freq_dim: width of the sinusoidal embedding of the time.
        image_dim: width of the image encoder's states; None for text-to-video.
        added_kv_proj_dim: width of the image's states in cross-attention; None for text-to-video.
        pos_embed_seq_len: tokens of two images (first and last frame) with learned positions; None
            without.
        rope_theta: base of RoPE's frequencies.
        eps: of every norm.
    """

    num_attention_heads: int = 12
    attention_head_dim: int = 128
    num_layers: int = 30
    ffn_dim: int = 8960
    in_channels: int = 16
    out_channels: int = 16
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 4096
    freq_dim: int = 256
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    pos_embed_seq_len: int | None = None
    rope_theta: float = 1e4
    eps: float = 1e-6

    @property
    def dim(self) -> int:
        """D, the width of a token."""
        return self.num_attention_heads * self.attention_head_dim

    def config(self) -> dict[str, Any]:
        """Return the content of diffusers' `config.json`."""
        own = {key: value for key, value in vars(self).items() if key != "rope_theta"}
        own |= {"patch_size": list(self.patch_size), "rope_max_seq_len": 1024}
        return {**ONLY, **own}

    @classmethod
    def of_folder(cls, folder: str | Path) -> Self:
        """Read the sizes from a folder's `config.json`.

        Raises:
            ConfigError: the folder does not exist.
            WeightsError: the file does not exist, or it describes another kind of model.
        """
        own = {field.name for field in fields(cls)}
        config = read_config(folder, "wan", ONLY, {*own, KEY, "rope_max_seq_len"})
        return checked(cls, config, vars(_14B))

    def misfits(self) -> Iterator[ConfigError]:
        """Yield sizes that do not fit each other."""
        if self.attention_head_dim % 2 or self.attention_head_dim < 6:
            rule = "it must be even and at least 6, for pairs of time, row and column"
            yield ConfigError("attention_head_dim", self.attention_head_dim, rule, "use 128")
        if self.freq_dim % 2:
            rule = "it must be even: cosines and sines"
            yield ConfigError("freq_dim", self.freq_dim, rule, "use an even number, such as 256")
        if (self.image_dim is None) != (self.added_kv_proj_dim is None):
            rule = f"added_kv_proj_dim is {self.added_kv_proj_dim}, and a model has both or neither"
            yield ConfigError("image_dim", self.image_dim, rule, "set both, or both to null")


# Also diffusers' defaults: keys that a file leaves out have these values.
_14B = Sizes(num_attention_heads=40, num_layers=40, ffn_dim=13824)
SIZES = {
    "wan-2.1-t2v-1.3b": Sizes(),
    "wan-2.1-t2v-14b": _14B,
    "wan-2.1-i2v-14b": replace(_14B, in_channels=36, image_dim=1280, added_kv_proj_dim=5120),
    "wan-2.2-t2v-a14b": _14B,
    "wan-2.2-i2v-a14b": replace(_14B, in_channels=36),
    "wan-2.2-ti2v-5b": Sizes(
        num_attention_heads=24, num_layers=30, ffn_dim=14336, in_channels=48, out_channels=48
    ),
}
# The share of the times above which the first of two transformers computes.
BOUNDARIES = {"wan-2.2-t2v-a14b": 0.875, "wan-2.2-i2v-a14b": 0.9}
REPOSITORIES = {
    "wan-2.1-t2v-1.3b": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "wan-2.1-t2v-14b": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "wan-2.1-i2v-14b": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "wan-2.2-t2v-a14b": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "wan-2.2-i2v-a14b": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "wan-2.2-ti2v-5b": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
}


# ---- settings ------------------------------------------------------------------------------------

Name = Literal[
    "wan-2.1-t2v-1.3b",
    "wan-2.1-t2v-14b",
    "wan-2.1-i2v-14b",
    "wan-2.2-t2v-a14b",
    "wan-2.2-i2v-a14b",
    "wan-2.2-ti2v-5b",
]


class ModelSettings(NamedModel):
    """The transformer, given by its folder or its sizes, and its dtypes."""

    known: ClassVar[Mapping[str, Any]] = SIZES
    repositories: ClassVar[Mapping[str, str]] = REPOSITORIES

    sizes: Name | None = None
    """Known sizes; null takes those of the folder."""

    num_attention_heads: Count | None = None
    """This and the rest change one of the named sizes, for a new model without weights."""
    attention_head_dim: Annotated[int, Ge(6)] | None = None
    num_layers: Count | None = None
    ffn_dim: Count | None = None
    in_channels: Count | None = None
    out_channels: Count | None = None
    text_dim: Count | None = None
    freq_dim: Count | None = None
    image_dim: Count | None = None
    added_kv_proj_dim: Count | None = None


class TrainingSettings(ForcedTraining):
    """Training by flow matching, with the distribution of its times."""

    expert: Literal["high_noise", "low_noise"] | None = None
    """Which of Wan 2.2 A14B's two transformers learns, at its own times alone."""
    boundary_ratio: Annotated[float, Gt(0), Lt(1)] | None = None
    """The least time of high_noise, a share; null: the folder's, else that of the named sizes."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse a boundary without an expert, and what every training refuses."""
        yield from super().contradictions(values)
        if (at := values["boundary_ratio"]) is not None and values["expert"] is None:
            rule = "it divides the times of two transformers, and expert is null"
            remedy = "set training.expert, or remove it"
            yield ConfigError("boundary_ratio", at, rule, remedy)


class SamplingSettings(FlowSampling):
    """Sampling of videos."""

    family: ClassVar[Family] = "wan"

    sampler: Literal["unipc", "flow_euler", "flow_lcm"] | None = None
    """UniPC, Euler steps, or steps that re-noise (flow_lcm), for models distilled for these; null:
    as the folder's scheduler_config.json says, else UniPC."""
    timestep_shift: Positive | None = None
    """Above 1: smaller steps near the noise (480p: 3, 720p: 5); null: the folder's, else 3."""
    height: Count = 480
    """Rows of pixels."""
    width: Count = 832
    """Columns of pixels."""
    frames: Count = 81
    """Frames of the video: a multiple of 4, and one."""
    fps: Count = 16
    """Frames a second, in the file."""
    guidance_scale_2: Annotated[float, Ge(0)] | None = None
    """Of Wan 2.2's second transformer, which takes the steps with less noise; null: the first's."""
    fast_2: FastSettings | None = None
    """Of Wan 2.2's second transformer, as `fast`; null: the same as the first's."""
    text_tokens: Count = 512
    """Tokens of a prompt; a shorter one is padded with zeros, as in the model's training."""

    def schedule(self, folder: str | None) -> Schedule:
        """Compute the sampler's schedule from these settings and a pipeline's folder."""
        return self.sampler_of(folder).schedule(self.num_inference_steps)

    def sampler_of(self, folder: str | None) -> Sampler:
        """Return the sampler from these settings and a pipeline's folder."""
        return read(folder, "flow", self.sampler, self.timestep_shift, **self.sampler_changes)


class Settings(ma.AttentionConfig):
    """The settings of attention, and the sections of the examples."""

    model: ModelSettings = ModelSettings(sizes="wan-2.1-t2v-1.3b")
    """The transformer."""
    data: DataSettings = DataSettings()
    """The examples."""
    training: TrainingSettings = TrainingSettings()
    """How it learns."""
    sampling: SamplingSettings = SamplingSettings()
    """How videos are drawn."""
    rollout: RolloutSettings = RolloutSettings()
    """How a model that was trained for it makes videos block by block."""
