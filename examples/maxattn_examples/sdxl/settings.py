"""The sizes of SDXL, and its settings: attention's, model, data, training and sampling.

The same YAML file trains (examples/train.py sdxl) and samples (examples/generate.py sdxl).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import maxattn as ma
from maxattn.errors import ConfigError, WeightsError
from maxattn_examples.common.pipeline_folder import Family, checked, read_config
from maxattn_examples.common.settings import Count, Positive, SizedModel
from maxattn_examples.sample.scheduler import read
from maxattn_examples.sample.settings import SamplingSettings as CommonSampling
from maxattn_examples.samplers import Schedule
from maxattn_examples.samplers.sampler import Sampler
from maxattn_examples.train.settings import DataSettings
from maxattn_examples.train.settings import TrainingSettings as CommonTraining

DOWN_BLOCKS = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
# Height and width of the original, top and left of the crop, height and width wanted.
SIZE_NUMBERS = 6
PROJECTED = "projection_class_embeddings_input_dim"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a UNet, under diffusers' names; the defaults are those of SDXL base 1.0.

    Args:
        block_out_channels: channels at each resolution, from the finest.
        down_block_types: diffusers' name of the block, with or without attention, by resolution.
        layers_per_block: residual blocks at each resolution, one more on the way up.
        transformer_layers_per_block: attention blocks after each residual block, by resolution.
        attention_head_dim: heads at each resolution (diffusers' misnomer).
        cross_attention_dim: width of the text's states.
        in_channels, out_channels: of the latents.
        addition_time_embed_dim: width of the embedding of each of the six numbers of size and crop.
        projection_class_embeddings_input_dim: width of these and the pooled text together.
        norm_num_groups, norm_eps: of the group norms.
    """

    block_out_channels: tuple[int, ...] = (320, 640, 1280)
    down_block_types: tuple[str, ...] = DOWN_BLOCKS
    layers_per_block: int = 2
    transformer_layers_per_block: tuple[int, ...] = (1, 2, 10)
    attention_head_dim: tuple[int, ...] = (5, 10, 20)
    cross_attention_dim: int = 2048
    in_channels: int = 4
    out_channels: int = 4
    addition_time_embed_dim: int = 256
    projection_class_embeddings_input_dim: int = 2816
    norm_num_groups: int = 32
    norm_eps: float = 1e-5

    @property
    def time_dim(self) -> int:
        """Width of the time's embedding."""
        return 4 * self.block_out_channels[0]

    @property
    def pooled_dim(self) -> int:
        """Width of the pooled text."""
        numbers = SIZE_NUMBERS * self.addition_time_embed_dim
        return self.projection_class_embeddings_input_dim - numbers

    @property
    def attends(self) -> tuple[bool, ...]:
        """Whether a resolution has attention."""
        return tuple(kind.startswith("CrossAttn") for kind in self.down_block_types)

    @property
    def up_block_types(self) -> list[str]:
        """The block types of the way up, which mirror those of the way down."""
        return [kind.replace("Down", "Up") for kind in reversed(self.down_block_types)]

    def config(self) -> dict[str, Any]:
        """Return the content of diffusers' `config.json`."""
        lists = {key: list(v) for key, v in vars(self).items() if isinstance(v, tuple)}
        own = vars(self) | lists
        return ONLY | {"up_block_types": self.up_block_types} | own

    @classmethod
    def of_folder(cls, folder: str | Path) -> Self:
        """Read the sizes from a folder's `config.json`.

        Raises:
            ConfigError: the folder does not exist.
            WeightsError: the file does not exist, or it describes a model that this UNet is not.
        """
        known = {*FREE, *(field.name for field in fields(cls))}
        config = read_config(folder, "sdxl", ONLY | USUAL_ALONE, known, needs=NEEDED)
        found = checked(cls, config, USUAL)
        if (up := config.get("up_block_types", found.up_block_types)) != found.up_block_types:
            rule = f"they mirror down_block_types: {found.up_block_types}"
            raise WeightsError("up_block_types", up, rule, "give the folder of SDXL")
        return found

    def misfits(self) -> Iterator[ConfigError]:
        """Yield sizes that do not fit each other."""
        yield from self._level_misfits()
        yield from self._channel_misfits()
        if self.pooled_dim < 1:
            least = SIZE_NUMBERS * self.addition_time_embed_dim + 1
            rule = f"it must be larger than {SIZE_NUMBERS} times addition_time_embed_dim"
            key, value = PROJECTED, self.projection_class_embeddings_input_dim
            yield ConfigError(key, value, rule, f"use {least} or more")

    def _level_misfits(self) -> Iterator[ConfigError]:
        levels = len(self.block_out_channels)
        for key in ("down_block_types", "transformer_layers_per_block", "attention_head_dim"):
            if len(each := getattr(self, key)) != levels:
                rule = f"it has one entry for each of the {levels} resolutions"
                yield ConfigError(key, list(each), rule, "give as many as block_out_channels has")
        if unknown := set(self.down_block_types) - set(DOWN_BLOCKS):
            rule = f"a block is {' or '.join(sorted(set(DOWN_BLOCKS)))}"
            yield ConfigError("down_block_types", sorted(unknown), rule, "use one of them")

    def _channel_misfits(self) -> Iterator[ConfigError]:
        channels, groups = self.block_out_channels, self.norm_num_groups
        if any(count % groups for count in channels):
            rule = f"it must divide the channels of every resolution, {list(channels)}"
            yield ConfigError("norm_num_groups", groups, rule, "use a divisor of all")
        heads = self.attention_head_dim
        if len(heads) == len(channels) and any(c % n for c, n in zip(channels, heads, strict=True)):
            rule = f"heads must divide the channels of their resolution, {list(channels)}"
            yield ConfigError("attention_head_dim", list(heads), rule, "use divisors of them")
        if self.addition_time_embed_dim % 2:
            value, rule = self.addition_time_embed_dim, "it must be even: cosines and sines"
            yield ConfigError("addition_time_embed_dim", value, rule, "use an even number")


# What diffusers' UNet could be beside SDXL, and this one is not.
ONLY = {
    "_class_name": "UNet2DConditionModel",
    "addition_embed_type": "text_time",
    "use_linear_projection": True,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "act_fn": "silu",
    "dual_cross_attention": False,
    "only_cross_attention": False,
    "class_embed_type": None,
    "encoder_hid_dim": None,
    "resnet_time_scale_shift": "default",
    "flip_sin_to_cos": True,
    "freq_shift": 0,
}
# The same, left out of files that are written here: diffusers' defaults.
USUAL_ALONE = {
    "addition_embed_type_num_heads": 64, "attention_type": "default", "center_input_sample": False,
    "class_embeddings_concat": False, "conv_in_kernel": 3, "conv_out_kernel": 3,
    "cross_attention_norm": None, "downsample_padding": 1, "encoder_hid_dim_type": None,
    "mid_block_only_cross_attention": None, "mid_block_scale_factor": 1,
    "num_attention_heads": None, "num_class_embeds": None, "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False, "reverse_transformer_layers_per_block": None,
    "time_cond_proj_dim": None, "time_embedding_act_fn": None, "time_embedding_dim": None,
    "time_embedding_type": "positional", "timestep_post_act": None,
}  # fmt: skip
# Keys of a file with any value: they change no number here.
FREE = ("up_block_types", "sample_size", "dropout", "upcast_attention")
# The keys of these for which diffusers' default is another model's, so that files need them.
NEEDED = ("addition_embed_type", "use_linear_projection")
# Sizes that a file may leave out: diffusers' defaults.
USUAL = {
    "layers_per_block": 2,
    "in_channels": 4,
    "out_channels": 4,
    "norm_num_groups": 32,
    "norm_eps": 1e-5,
}


# ---- settings ------------------------------------------------------------------------------------

Prediction = Literal["epsilon", "v_prediction"]


class ModelSettings(SizedModel):
    """The UNet, given by its folder or its sizes, and its dtypes."""

    usual: ClassVar[Sizes] = Sizes()

    prediction_type: Prediction | None = None
    """The UNet's prediction, noise or v; null: that of the folder's scheduler, else noise."""

    block_out_channels: tuple[Count, ...] | None = None
    """This and the rest change one of SDXL's sizes, for a new model without weights."""
    layers_per_block: Count | None = None
    transformer_layers_per_block: tuple[Count, ...] | None = None
    attention_head_dim: tuple[Count, ...] | None = None
    cross_attention_dim: Count | None = None
    addition_time_embed_dim: Count | None = None
    projection_class_embeddings_input_dim: Count | None = None
    norm_num_groups: Count | None = None


class TrainingSettings(CommonTraining):
    """Training of the UNet."""

    snr_gamma: Positive | None = None
    """Min-SNR weights: times with a stronger signal than this count less; 5 is usual, null none."""


class SamplingSettings(CommonSampling):
    """Sampling of pictures."""

    family: ClassVar[Family] = "sdxl"

    sampler: Literal["euler", "ddim", "lcm"] | None = None
    """Euler steps, DDIM, or steps that re-noise (lcm), for models distilled for these; null: as the
    folder's scheduler_config.json says, else Euler."""
    height: Count = 1024
    """Rows of pixels."""
    width: Count = 1024
    """Columns of pixels."""

    def schedule(self, folder: str | None, prediction_type: Prediction | None = None) -> Schedule:
        """Compute the sampler's schedule from these settings and a pipeline's folder."""
        return self.sampler_of(folder, prediction_type).schedule(self.num_inference_steps)

    def sampler_of(self, folder: str | None, prediction_type: Prediction | None = None) -> Sampler:
        """Return the sampler; the folder's prediction type takes precedence over the settings'."""
        how = {"prediction_type": prediction_type, **self.sampler_changes}
        return read(folder, "discrete", self.sampler, **how)


class Settings(ma.AttentionConfig):
    """The keys of attention, and the sections model, data, training and sampling."""

    model: ModelSettings = ModelSettings()
    """The UNet."""
    data: DataSettings = DataSettings()
    """The examples."""
    training: TrainingSettings = TrainingSettings()
    """How it learns."""
    sampling: SamplingSettings = SamplingSettings()
    """How pictures are drawn."""
