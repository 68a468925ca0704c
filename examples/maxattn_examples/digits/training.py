"""Trains the digits' model: the loop of train/ with its task."""

from __future__ import annotations

from typing import Any

import jax

from maxattn_examples.train.loop import Training

from .model import WanTransformer
from .settings import Settings
from .task import DigitsTask


def train(
    settings: Settings, mesh: jax.sharding.Mesh | None = None
) -> tuple[WanTransformer, list[float]]:
    """Train to the last step; return the averaged model and the loss of every step.

    Args:
        settings: of everything.
        mesh: devices to train on; default the one there is.

    Raises:
        ConfigErrors: the checkpoint belongs to other settings.
    """
    task: Any = DigitsTask(settings)
    return Training(task, mesh).run()


def trained(settings: Settings, mesh: jax.sharding.Mesh | None = None) -> WanTransformer:
    """Load the averaged model of the last checkpoint.

    Args:
        settings: those that it was trained with; how to draw may differ.
        mesh: devices to draw on; default the one there is.

    Raises:
        ConfigError: there is none, or it belongs to other settings.
    """
    task: Any = DigitsTask(settings)
    return Training(task, mesh).trained()
