"""The settings of training by flow matching: at which times a model learns."""

from __future__ import annotations

from typing import Literal

from maxattn_examples.common.settings import Positive

from .settings import TrainingSettings


class FlowTraining(TrainingSettings):
    """Training by flow matching, and how its times are drawn."""

    timestep_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """How times between 0 (clean) and 1 (noise) are drawn, before the shift."""
    logit_mean: float = 0.0
    """Of logit_normal: above 0, more of the noisy times."""
    logit_std: Positive = 1.0
    """Of logit_normal: its spread."""
    timestep_shift: Positive = 3.0
    """Moves times t to shift t / (1 + (shift - 1) t): above 1, more of the noisy ones."""
