"""Moving digits as latents and texts for any model, with stand-ins for the encoders.

Latents are the pixels of squares, so decoding is exact. Each word has a fixed random vector, and a
text is the vectors of its digit and its direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Float

from . import torus
from .settings import ClipData
from .torus import Scans
from .words import TORUS

Model = Literal["wan", "i2v", "sdxl"]
FRAMES, CANVAS = 5, 16  # of a video, and pixels along a side of a frame
DATA = ClipData(source="torus", frames=FRAMES, canvas=CANVAS, speed=1, start_every=1)
# Pixels along a side of a square: their square is the number of channels.
SIDE = {"wan": 4, "i2v": 4, "sdxl": 2}
MASKS = 4  # channels of an image-to-video condition that say which frames are given
IMAGE, IMAGE_TOKENS = 1280, 257  # width and number of the image encoder's states


def batches(
    model: Model, count: int, text_dim: int, pooled_dim: int = 1280, seed: int = 0
) -> Iterator[dict]:
    """Yield examples, one at a time.

    Args:
        model: which one they are for.
        count: of the examples.
        text_dim: width of the text's states.
        pooled_dim: width of the pooled text, for SDXL.
        seed: of what they show.
    """
    scans, words, pools = Scans.of("train"), _states(text_dim), _states(pooled_dim)
    clips = torus.draw(seed, jnp.arange(count), scans.first, DATA)
    videos = np.asarray(torus.render(jnp.asarray(scans.ink)[clips.scan], clips, DATA, FRAMES))
    said = np.stack([clips.digit, 10 + clips.way], -1)  # numbers in the vocabulary
    for video, numbers in zip(videos, said, strict=True):
        example: dict[str, np.ndarray] = {
            "latents": _latents(video, SIDE[model]),
            "text": words[numbers],
        }
        if model == "sdxl":
            example["latents"] = example["latents"][:, 0]
            example["pooled"] = pools[numbers].sum(0)
            example["time_ids"] = np.array([CANVAS, CANVAS, 0, 0, CANVAS, CANVAS], np.float32)
        if model == "i2v":
            example |= _first_frame(video)
        yield {name: array[None] for name, array in example.items()}


def empty(model: Model, text_dim: int, pooled_dim: int = 1280) -> dict[str, np.ndarray]:
    """Return the zeros that replace a dropped text."""
    arrays: dict[str, np.ndarray] = {}
    arrays["negative_text"] = np.zeros((1, TORUS.length, text_dim), np.float32)
    if model == "sdxl":
        arrays["negative_pooled"] = np.zeros((1, pooled_dim), np.float32)
    return arrays


def _states(width: int) -> Float[np.ndarray, "words D"]:
    """Draw a vector for each word, with a fixed seed."""
    shape = (len(TORUS.vocabulary), width)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _latents(frames: Float[np.ndarray, "F H W"], side: int) -> Float[np.ndarray, "C F h w"]:
    return rearrange(frames, "F (h y) (w x) -> (y x) F h w", y=side, x=side)


def _first_frame(frames: Any) -> dict[str, np.ndarray]:
    given = np.concatenate([frames[:1], 0 * frames[1:]])
    latents = _latents(given, SIDE["i2v"])
    mask = np.zeros((MASKS, *latents.shape[1:]), np.float32)
    mask[:, 0] = 1.0
    image = np.zeros((IMAGE_TOKENS, IMAGE), np.float32)
    image[: frames[0].size // CANVAS, :CANVAS] = frames[0].reshape(-1, CANVAS)
    return {"image": image, "condition": np.concatenate([mask, latents])}
