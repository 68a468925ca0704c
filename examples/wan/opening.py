"""What a run says before its first step: how attention will run, where it goes on from, what has changed since."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import maxattn as ma
from maxattn.masks import KeyPadding

from . import text
from .checkpoint import Checkpoints
from .settings import Settings


def plans_of(settings: Settings, mesh: jax.sharding.Mesh | None = None) -> dict[str, ma.Plan]:
    """Plan self- and cross-attention of a training step, as the model will call them.

    Args:
        settings: sizes, batch and the keys of attention.
        mesh: devices to train on.
    """
    model, batch = settings.model, settings.training.batch_size
    heads = (model.heads, model.dim_head)
    video = jax.ShapeDtypeStruct((batch, math.prod(settings.grid), *heads), jnp.float32)
    words = jax.ShapeDtypeStruct((batch, text.LENGTH, *heads), jnp.float32)
    mask = KeyPadding(np.full(batch, text.LENGTH, np.int32))
    calls = {"self": ma.Call.of(video, video), "cross": ma.Call.of(video, words, mask, role="cross")}
    return {role: ma.plan(call, settings, mesh) for role, call in calls.items()}


def opening(settings: Settings, checkpoints: Checkpoints, plans: dict[str, ma.Plan]) -> Iterator[str]:
    """Say what will run, where it goes on from, and what has changed since."""
    yield from (plan.explain() for plan in plans.values())
    done, wanted = checkpoints.step, settings.training.steps
    if not done:
        yield f"training {wanted} steps from the start; checkpoints in {checkpoints.folder}"
        return
    if done >= wanted:
        yield f"training is complete: {done} of {wanted} steps in {checkpoints.folder}"
        yield "going straight to drawing; training.resume=false trains anew"
        return
    yield f"going on from step {done} of {wanted}, in {checkpoints.folder}"
    before = checkpoints.facts["settings"]["training"]["steps"]
    if before != wanted:
        yield f"  training.steps was {before}: the learning rate follows the new schedule from here"
    for role, plan in plans.items():
        yield from (f"  {role}-attention changed: {line}" for line in plan.diff(checkpoints.facts["plans"][role]))
