"""Sizes of Flux.1's transformers, by name or from a folder's `config.json`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from maxattn.errors import ConfigError, WeightsError
from maxattn_examples.common.model_config import checked, read_config

CLASS_NAME = "FluxTransformer2DModel"
PATCH = 2  # rows and columns of latents in a token
# What diffusers' class could be beside FLUX.1-dev and schnell: its own patches, and other channels
# out than in, as of the models that fill a picture in or follow a depth.
ONLY = {"_class_name": CLASS_NAME, "patch_size": 1}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer, under diffusers' names; the defaults are FLUX.1-dev's.

    Args:
        num_attention_heads, attention_head_dim: N and H; the width D is their product.
        num_layers: double blocks.
        num_single_layers: single blocks.
        in_channels: of a token: channels of the latents times latents of a patch.
        joint_attention_dim: width of the text's states.
        pooled_projection_dim: width of the pooled text.
        guidance_embeds: whether guidance is an input.
        axes_dims_rope: rotated channels of a head, for time, row and column.
    """

    num_attention_heads: int = 24
    attention_head_dim: int = 128
    num_layers: int = 19
    num_single_layers: int = 38
    in_channels: int = 64
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = True
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    @property
    def dim(self) -> int:
        """D, the width of a token."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def channels(self) -> int:
        """C, the channels of the latents."""
        return self.in_channels // PATCH**2

    def config(self) -> dict[str, Any]:
        """Return the content of diffusers' `config.json`."""
        return {**ONLY, **vars(self), "axes_dims_rope": list(self.axes_dims_rope)}

    @classmethod
    def of_folder(cls, folder: str | Path) -> Self:
        """Read the sizes from a folder's `config.json`.

        Raises:
            ConfigError: the folder does not exist.
            WeightsError: the file does not exist, or it describes another kind of model.
        """
        own = {field.name for field in fields(cls)}
        config = read_config(folder, "flux", ONLY, {*own, "out_channels"})
        # A key that a file leaves out has diffusers' default, which is False.
        found = checked(cls, config, {**vars(cls()), "guidance_embeds": False})
        if config.get("out_channels") not in (None, found.in_channels):
            rule = f"FLUX.1-dev and schnell return the {found.in_channels} channels of their input"
            remedy = "give one of them; inpainting and depth models are not supported"
            raise WeightsError("out_channels", config["out_channels"], rule, remedy)
        return found

    def misfits(self) -> Iterator[ConfigError]:
        """Yield sizes that do not fit each other."""
        axes, head_dim = self.axes_dims_rope, self.attention_head_dim
        if len(axes) != 3 or sum(axes) != head_dim or any(n % 2 for n in axes):
            rule = f"three even numbers, of time, row and column, whose sum is head dim {head_dim}"
            remedy = "change axes_dims_rope and attention_head_dim together"
            yield ConfigError("axes_dims_rope", list(axes), rule, remedy)
        if self.in_channels % PATCH**2:
            rule = f"a token has the channels of {PATCH}x{PATCH} latents"
            remedy = f"give a multiple of {PATCH**2}"
            yield ConfigError("in_channels", self.in_channels, rule, remedy)


SIZES = {"flux.1-dev": Sizes(), "flux.1-schnell": Sizes(guidance_embeds=False)}
REPOSITORIES = {
    "flux.1-dev": "black-forest-labs/FLUX.1-dev",
    "flux.1-schnell": "black-forest-labs/FLUX.1-schnell",
}
