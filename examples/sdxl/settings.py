"""The settings of SDXL: those of attention, and the sections `model`, `data`, `training` and
`sampling`.

The same YAML file trains (examples/train_sdxl.py) and draws (examples/generate_sdxl.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from generate.settings import SamplingSettings as Drawing
from samplers import Schedule
from samplers.read import Sampler, read
from train.settings import Count, DataSettings, Dtype, Positive
from train.settings import TrainingSettings as Common

import maxattn as ma
from maxattn.config.section import Section
from maxattn.errors import ConfigError

from .sizes import Sizes

Prediction = Literal["epsilon", "v_prediction"]


class ModelSettings(Section):
    """Hold which UNet it is, and in which dtypes."""

    folder: str | None = None
    """A folder in diffusers' format, a pipeline's or its unet: sizes and weights. Null: random
    weights.
    """
    dtype: Dtype = "bfloat16"
    """Of the computation; norms and softmax are float32 whatever it is."""
    param_dtype: Dtype = "float32"
    """Of the parameters."""
    prediction_type: Prediction | None = None
    """What the UNet says of a noisy picture: the noise, or v. Null: as the folder's scheduler, or
    the noise.
    """
    shapes: tuple[str, ...] = ()
    """What `maxattn check`, `compile` and `tune` look at; the model itself takes any shape."""

    block_out_channels: tuple[Count, ...] | None = None
    """This and the rest change one of SDXL's sizes, for a model of one's own, trained from nothing.
    """
    layers_per_block: Count | None = None
    transformer_layers_per_block: tuple[Count, ...] | None = None
    attention_head_dim: tuple[Count, ...] | None = None
    cross_attention_dim: Count | None = None
    addition_time_embed_dim: Count | None = None
    projection_class_embeddings_input_dim: Count | None = None
    norm_num_groups: Count | None = None

    @property
    def changed_sizes(self) -> dict[str, Any]:
        """The sizes that are not SDXL's."""
        return {key: value for key in OWN if (value := getattr(self, key)) is not None}

    @property
    def asked(self) -> Sizes | None:
        """The sizes that are named here; None where the folder says them."""
        return (
            None
            if self.folder is not None and not self.changed_sizes
            else Sizes(**self.changed_sizes)
        )

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse lists that do not speak of the same resolutions."""
        sizes = Sizes(**{key: values[key] for key in OWN if values[key] is not None})
        for key in ("transformer_layers_per_block", "attention_head_dim"):
            if len(getattr(sizes, key)) != len(sizes.block_out_channels):
                rule = (
                    f"it has one number for each of the {len(sizes.block_out_channels)} resolutions"
                )
                yield ConfigError(
                    key, list(getattr(sizes, key)), rule, "give as many as block_out_channels has"
                )


OWN = tuple(key for key in ModelSettings.model_fields if key in Sizes.__dataclass_fields__)


class TrainingSettings(Common):
    """Hold how the UNet learns."""

    snr_gamma: Positive | None = None
    """Min-SNR weights: times whose signal is stronger than this count less, by its ratio; 5 is
    usual, null is none.
    """


class SamplingSettings(Drawing):
    """Hold how pictures are drawn."""

    sampler: Literal["euler", "ddim"] | None = None
    """Euler steps, or DDIM; null: what the folder's scheduler_config.json says, Euler without one.
    """
    height: Count = 1024
    """Rows of pixels."""
    width: Count = 1024
    """Columns of pixels."""

    def schedule(self, folder: str | None, prediction_type: Prediction | None = None) -> Schedule:
        """Make the numbers of the sampler, as a pipeline's folder, if there is one, and these
        settings say.
        """
        return self.sampler_of(folder, prediction_type).schedule(self.num_inference_steps)

    def sampler_of(self, folder: str | None, prediction_type: Prediction | None = None) -> Sampler:
        """Choose the sampler; what the model predicts is said by the folder, else as given."""
        return read(folder, "discrete", self.sampler, prediction_type=prediction_type)


class Settings(ma.AttentionConfig):
    """Hold everything: the keys of attention, and the sections `model`, `data`, `training` and
    `sampling`.
    """

    model: ModelSettings = ModelSettings()
    """The UNet."""
    data: DataSettings = DataSettings()
    """The examples."""
    training: TrainingSettings = TrainingSettings()
    """How it learns."""
    sampling: SamplingSettings = SamplingSettings()
    """How pictures are drawn."""
