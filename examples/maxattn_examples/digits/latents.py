"""The moving digits as latents and texts for any of the models: real pictures, made-up encoders.

Latents are the pixels of squares (common/ink.py), so that the picture comes back exactly. A word's
state is a fixed random vector; a text is its words' states, then zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from jaxtyping import Float

from maxattn_examples.common.pictures import to_latents

from . import text
from .settings import DataSettings
from .videos import DigitVideos
from .words import VOCABULARY

Model = Literal["wan", "i2v", "sdxl"]
CANVAS = 16  # pixels along a side of a frame
# Pixels along a side of a square: their square is the number of channels.
SIDE = {"wan": 4, "i2v": 4, "sdxl": 2}
MASKS = 4  # channels of an image-to-video condition that say which frames are given
IMAGE = 1280  # width of the image encoder's states
IMAGE_TOKENS = 257


def word_states(width: int) -> Float[np.ndarray, "words D"]:
    """Draw a state for each word, the same every time; the padding's is zero."""
    states = np.random.default_rng(0).standard_normal((len(VOCABULARY), width)).astype(np.float32)
    states[text.PAD] = 0.0
    return states


def batches(
    model: Model, count: int, text_dim: int, pooled_dim: int = 1280, seed: int = 0
) -> Iterator[dict]:
    """Yield `count` examples, one at a time, drawn from all videos without repeating.

    Args:
        model: which one they are for.
        count: at most as many as there are videos.
        text_dim: width of the text's states.
        pooled_dim: width of the pooled text, for SDXL.
        seed: of the order.
    """
    videos = DigitVideos(DataSettings(frames=5, canvas=CANVAS, lane_spread=2))
    words, pools = word_states(text_dim), word_states(pooled_dim)
    for index in np.random.default_rng(seed).permutation(len(videos))[:count]:
        one = videos[int(index)]
        tokens = one["tokens"]
        frames = one["video"][..., 0]
        example: dict[str, np.ndarray] = {
            "latents": to_latents(frames, SIDE[model]),
            "text": words[tokens],
        }
        if model == "sdxl":
            example["latents"] = example["latents"][:, 0]
            example["pooled"] = pools[tokens].sum(0)
            example["time_ids"] = np.array([CANVAS, CANVAS, 0, 0, CANVAS, CANVAS], np.float32)
        if model == "i2v":
            example |= _first_frame(frames)
        yield {name: array[None] for name, array in example.items()}


def empty(model: Model, text_dim: int, pooled_dim: int = 1280) -> dict[str, np.ndarray]:
    """Return the replacement of a dropped text: no words."""
    arrays: dict[str, np.ndarray] = {}
    arrays["negative_text"] = np.zeros((1, text.LENGTH, text_dim), np.float32)
    if model == "sdxl":
        arrays["negative_pooled"] = np.zeros((1, pooled_dim), np.float32)
    return arrays


def _first_frame(frames: Float[np.ndarray, "F H W"]) -> dict[str, np.ndarray]:
    """Return the condition of the first frame (encoded, and marked), and states of its pixels."""
    given = np.zeros_like(frames)
    given[0] = frames[0]
    latents = to_latents(given, SIDE["i2v"])
    mask = np.zeros((MASKS, *latents.shape[1:]), np.float32)
    mask[:, 0] = 1.0
    image = np.zeros((IMAGE_TOKENS, IMAGE), np.float32)
    image[: frames[0].size // CANVAS, :CANVAS] = frames[0].reshape(-1, CANVAS)
    return {"image": image, "condition": np.concatenate([mask, latents])}
