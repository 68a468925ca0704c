"""A program's settings around attention, as a training program would declare them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from maxattn.config import AttentionConfig
from maxattn.config.section import Section


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
