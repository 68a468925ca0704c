"""A training program's settings, with attention's among them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from maxattn.config import AttentionConfig
from maxattn.config.section import Section

# Other projects' spellings of `attention`: kernel and strategy.
FOREIGN = {
    "tokamax_ring": ("tokamax_flash", "ring"),
    "tokamax_ring_custom": ("tpu_flash", "ring"),
    "ulysses_custom": ("tpu_flash", "ulysses"),
    "ulysses_custom_fixed_m": ("tpu_flash", "ulysses"),
    "ulysses_ring_custom": ("tpu_flash", "ulysses_ring"),
    "ulysses_ring_custom_bidir": ("tpu_flash", "ulysses_ring"),
    "ulysses_ring_custom_fixed_m": ("tpu_flash", "ulysses_ring"),
}


class ModelSettings(Section):
    """A model."""

    dim: int = Field(default=96, gt=0)
    patch: tuple[int, int, int] = (1, 4, 4)
    name: str = "tiny"
    seed: int = 0


class TrainingSettings(Section):
    """A training run."""

    steps: int = Field(ge=1)
    learning_rate: float = 1e-3
    schedule: Literal["constant", "cosine"] = "cosine"
    seed: int = 0


class Settings(AttentionConfig):
    """Everything in one file."""

    model: ModelSettings = ModelSettings()
    training: TrainingSettings
