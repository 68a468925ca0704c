"""AdamW with a warm-up and gradients clipped to a length."""

from __future__ import annotations

from typing import Any

import optax

from .settings import TrainingSettings


def schedule(training: TrainingSettings) -> optax.Schedule:
    """Map a step to its learning rate: up to the peak, then constant or down along a cosine.

    Args:
        training: learning_rate, learning_rate_schedule, warmup_steps and steps.
    """
    peak, warmup = training.learning_rate, training.warmup_steps
    if training.learning_rate_schedule == "cosine":
        last = max(training.steps, warmup + 1)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, last, 0.01 * peak)
    if not warmup:  # optax's warm-up of no steps would stay at zero for ever
        return optax.constant_schedule(peak)
    return optax.warmup_constant_schedule(0.0, peak, warmup)


def optimizer(training: TrainingSettings) -> optax.GradientTransformation:
    """Make AdamW; weight decay pulls at every trained parameter.

    Args:
        training: the keys of the optimizer.
    """
    how: dict[str, Any] = {
        "weight_decay": training.weight_decay,
        "mu_dtype": training.moment_dtype,
    }
    adamw = optax.adamw(schedule(training), training.adam_b1, training.adam_b2, **how)
    longest = training.max_grad_norm
    clip = optax.clip_by_global_norm(longest) if longest else optax.identity()
    return optax.chain(clip, adamw)
