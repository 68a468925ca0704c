"""AdamW with a warm-up and gradients clipped to a length."""

from __future__ import annotations

import optax

from .settings import TrainingSettings


def schedule(training: TrainingSettings) -> optax.Schedule:
    """Map a step to its learning rate: up from zero to the peak, then constant or along a cosine to
    a hundredth.

    Args:
        training: learning_rate, learning_rate_schedule, warmup_steps and steps.
    """
    peak, warmup = training.learning_rate, training.warmup_steps
    if training.learning_rate_schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, warmup, max(training.steps, warmup + 1), 0.01 * peak
        )
    # A warm-up of no steps would stay at zero for ever.
    return (
        optax.warmup_constant_schedule(0.0, peak, warmup)
        if warmup
        else optax.constant_schedule(peak)
    )


def optimizer(training: TrainingSettings) -> optax.GradientTransformation:
    """Make AdamW; weight decay pulls at every trained parameter.

    Args:
        training: the keys of the optimizer.
    """
    adamw = optax.adamw(
        schedule(training),
        training.adam_b1,
        training.adam_b2,
        weight_decay=training.weight_decay,
        mu_dtype=training.moment_dtype,
    )
    clip = (
        optax.clip_by_global_norm(training.max_grad_norm)
        if training.max_grad_norm
        else optax.identity()
    )
    return optax.chain(clip, adamw)
