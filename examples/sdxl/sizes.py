"""Sizes of an SDXL UNet: those of SDXL base 1.0, or of a folder's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from common.model_config import read_config

DOWN_BLOCKS = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
# Height and width of the original, top and left of the crop, height and width wanted.
SIZE_NUMBERS = 6


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes of a UNet, under diffusers' names; the defaults are those of SDXL base 1.0.

    Args:
        block_out_channels: channels at each resolution, from the finest.
        down_block_types: at which resolutions there is attention, as diffusers names blocks.
        layers_per_block: residual blocks at each resolution, one more on the way up.
        transformer_layers_per_block: attention blocks after each residual block, by resolution.
        attention_head_dim: heads at each resolution (a misnomer that diffusers keeps).
        cross_attention_dim: width of the text's states.
        in_channels, out_channels: of the latents.
        addition_time_embed_dim: sinusoids of each of the six numbers of size and crop.
        projection_class_embeddings_input_dim: width of those and the pooled text together.
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
        """Whether there is attention, by resolution."""
        return tuple(kind.startswith("CrossAttn") for kind in self.down_block_types)

    def config(self) -> dict[str, Any]:
        """Return what diffusers keeps in `config.json` beside the weights."""
        up = [kind.replace("Down", "Up") for kind in reversed(self.down_block_types)]
        lists = {key: list(v) for key, v in vars(self).items() if isinstance(v, tuple)}
        own = vars(self) | lists
        return ONLY | {"mid_block_type": "UNetMidBlock2DCrossAttn", "up_block_types": up} | own

    @classmethod
    def of_folder(cls, folder: str | Path) -> Self:
        """Read the sizes from a folder's `config.json`.

        Raises:
            ConfigError: there is no such folder.
            WeightsError: there is none, or it describes a model that this UNet is not.
        """
        config = read_config(folder, "sdxl", ONLY)
        own: dict[str, Any] = {
            field.name: config.get(field.name, field.default) for field in fields(cls)
        }
        own |= {key: tuple(value) for key, value in own.items() if isinstance(value, list)}
        return cls(**own)


# What diffusers' UNet could be beside SDXL, and this one is not.
ONLY = {
    "_class_name": "UNet2DConditionModel",
    "addition_embed_type": "text_time",
    "use_linear_projection": True,
    "act_fn": "silu",
    "dual_cross_attention": False,
    "only_cross_attention": False,
    "class_embed_type": None,
    "encoder_hid_dim": None,
    "resnet_time_scale_shift": "default",
    "flip_sin_to_cos": True,
    "freq_shift": 0,
}
