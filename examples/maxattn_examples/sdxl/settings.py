"""The settings of SDXL: those of attention, and the sections model, data, training, sampling.

The same YAML file trains (examples/train.py sdxl) and samples (examples/generate.py sdxl).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import maxattn as ma
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.settings import Count, Positive, SizedModel
from maxattn_examples.sample.scheduler import read
from maxattn_examples.sample.settings import SamplingSettings as CommonSampling
from maxattn_examples.samplers import Schedule
from maxattn_examples.samplers.sampler import Sampler
from maxattn_examples.train.settings import DataSettings
from maxattn_examples.train.settings import TrainingSettings as CommonTraining

from .sizes import Sizes

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
