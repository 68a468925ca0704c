"""The sizes of Flux.1, and its settings: attention's, model, data, training and sampling.

The same YAML file trains (examples/train.py flux) and samples (examples/generate.py flux).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import maxattn as ma
from maxattn.errors import ConfigError, WeightsError
from maxattn_examples.common.pipeline_folder import Family, checked, read_config
from maxattn_examples.common.settings import Count, NamedModel, NotNegative, Positive
from maxattn_examples.sample.scheduler import NO_FILE, read
from maxattn_examples.sample.settings import FlowSampling
from maxattn_examples.samplers.sampler import Sampler
from maxattn_examples.train.settings import DataSettings, FlowTraining

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


# ---- settings ------------------------------------------------------------------------------------

GUIDANCE = 3.5  # FLUX.1-dev's usual guidance
UNSHIFTED = {"use_dynamic_shifting": False, "shift": 1.0}  # as FLUX.1-schnell is sampled


class ModelSettings(NamedModel):
    """The transformer, given by its folder or its sizes, and its dtypes."""

    known: ClassVar[dict[str, Any]] = SIZES
    repositories: ClassVar[dict[str, str]] = REPOSITORIES

    sizes: Literal["flux.1-dev", "flux.1-schnell"] | None = None
    """Known sizes; null takes those of the folder."""

    num_attention_heads: Count | None = None
    """This and the rest change one of the named sizes, for a new model without weights."""
    attention_head_dim: Count | None = None
    num_layers: Count | None = None
    num_single_layers: Count | None = None
    in_channels: Count | None = None
    joint_attention_dim: Count | None = None
    pooled_projection_dim: Count | None = None
    axes_dims_rope: tuple[Count, ...] | None = None


class TrainingSettings(FlowTraining):
    """Training by flow matching, with the distribution of its times."""

    timestep_shift: Positive = 1.0
    """Moves times t to shift t / (1 + (shift - 1) t): above 1, more of the noisy ones."""
    embedded_guidance: NotNegative = 1.0
    """The guidance that is an input of FLUX.1-dev in training; schnell has no such input."""


class SamplingSettings(FlowSampling):
    """Sampling of pictures."""

    family: ClassVar[Family] = "flux"
    cfg_key: ClassVar[str] = "true_cfg_scale"

    sampler: Literal["flow_euler", "flow_lcm"] | None = None
    """Euler steps over even sigmas, or steps that re-noise (flow_lcm), for models distilled for
    these; null: as the folder's scheduler_config.json says, else Euler steps."""
    num_inference_steps: Count = 28
    """Steps from noise to picture; schnell takes 4."""
    guidance_scale: NotNegative | None = None
    """The guidance that is an input of FLUX.1-dev; null is 3.5. schnell has no such input."""
    true_cfg_scale: NotNegative = 1.0
    """Classifier-free guidance away from the negative prompt; up to 1 is none, in half the time."""
    timestep_shift: Positive | None = None
    """Above 1: smaller steps near the noise; null: as the folder says, by the tokens of dev."""
    height: Count = 1024
    """Rows of pixels."""
    width: Count = 1024
    """Columns of pixels."""
    text_tokens: Count = 512
    """Tokens of a prompt for the T5 encoder; schnell was trained with 256."""

    def sampler_of(self, folder: str | None, sizes: Sizes, tokens: int = 0) -> Sampler:
        """Return the sampler for `tokens`; without a folder, the usual one of the sizes."""
        how = self.sampler_changes
        found = read(folder, "even_flow", self.sampler, self.timestep_shift, **how).of_tokens(
            tokens
        )
        if found.said_by != NO_FILE or self.timestep_shift is not None or sizes.guidance_embeds:
            return found
        return replace(found, options={**found.options, **UNSHIFTED})


class Settings(ma.AttentionConfig):
    """The keys of attention, and the sections model, data, training and sampling."""

    model: ModelSettings = ModelSettings(sizes="flux.1-dev")
    """The transformer."""
    data: DataSettings = DataSettings()
    """The examples."""
    training: TrainingSettings = TrainingSettings()
    """How it learns."""
    sampling: SamplingSettings = SamplingSettings()
    """How pictures are drawn."""
