"""The settings of Wan 2.1 and 2.2: those of attention, and five sections of the examples.

The same YAML file trains (examples/train.py wan) and samples (examples/generate.py wan).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.settings import Count, NamedModel, Positive, RolloutSettings
from maxattn_examples.sample.fast import FastSettings
from maxattn_examples.sample.scheduler import read
from maxattn_examples.sample.settings import FlowSampling
from maxattn_examples.samplers import Schedule
from maxattn_examples.samplers.sampler import Sampler
from maxattn_examples.train.settings import DataSettings, ForcedTraining

from .sizes import REPOSITORIES, SIZES

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
