"""Trains SDXL: the loop of train/ with this model's task."""

from __future__ import annotations

import jax
from flax import nnx
from train.loop import Training

from .settings import Settings
from .task import SdxlTask, sizes_of


def train(settings: Settings, mesh: jax.sharding.Mesh | None = None) -> tuple[nnx.Module, list[float]]:
    """Train from the last checkpoint to the last step, and export.

    Args:
        settings: of everything.
        mesh: devices to train on; default the one there is.

    Returns:
        The UNet that draws, and the loss of every step.

    Raises:
        ConfigErrors: data, model, mesh and checkpoint do not fit each other; nothing has been computed then.
    """
    task = SdxlTask(settings, sizes_of(settings.model))
    return Training(task, mesh).run()
