"""The settings of Flux.1: those of attention, and the sections model, data, training, sampling.

The same YAML file trains (examples/train.py flux) and samples (examples/generate.py flux).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import maxattn as ma
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.settings import Count, NamedModel, NotNegative, Positive
from maxattn_examples.sample.scheduler import NO_FILE, read
from maxattn_examples.sample.settings import FlowSampling
from maxattn_examples.samplers.sampler import Sampler
from maxattn_examples.train.settings import DataSettings, FlowTraining

from .sizes import REPOSITORIES, SIZES, Sizes

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
