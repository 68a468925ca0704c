"""What a model is told, in shapes, where nothing is encoded."""

from __future__ import annotations

import numpy as np

from .files import MAY_LACK
from .task import Arrays, SamplingTask

TOKENS = {"text": 77, "image": 257}  # of CLIP; other encoders' are a setting


def assumed_lengths(task: SamplingTask) -> dict[str, int]:
    """Return the tokens of a prompt, and of an image if the model is told one."""
    text = getattr(task.settings.sampling, "text_tokens", TOKENS["text"])
    image = {"image": TOKENS["image"]} if "image" in task.expected(False) else {}
    return {"text": text} | image


def assumed(task: SamplingTask) -> Arrays:
    """Return zeros of the shapes that encoding one prompt gives."""
    lengths = assumed_lengths(task)
    forms = task.expected(task.settings.sampling.guided).items()

    def size(name: str, axis: int | str) -> int:
        return axis if isinstance(axis, int) else lengths[name.removeprefix("negative_")]

    shapes = {
        name: tuple(size(name, axis) for axis in form)
        for name, form in forms
        if name not in MAY_LACK
    }
    return {name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}
