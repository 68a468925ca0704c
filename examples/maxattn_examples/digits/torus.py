"""One handwritten digit that moves for ever: opposite edges of the canvas are joined.

Each frame is the one before it, rolled, so the digit's place in any frame is known. Latents are the
pixels of squares, so decoding is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Int, UInt8

import maxattn as ma

from .settings import ClipData
from .words import STEPS

SIDE = 8  # pixels along a side of a scan
INK = 16.0  # the darkest value of a scan
SQUARE = 3  # pixels along a side of a square: its pixels are the channels of a latent
TOKEN = 2 * SQUARE  # pixels along a side of a token: Wan's patches are 2 x 2 latents
TURNED = 0.7  # share of the clips whose sink is further away than the clip begins
Split = Literal["train", "test"]
Frames = Float[np.ndarray, "... H W"]


def load(split: Split) -> tuple[UInt8[np.ndarray, "n 8 8"], Int[np.ndarray, " n"]]:
    """Load scans and their labels: every fifth is for "test", the others are for "train"."""
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    kept = (np.arange(len(labels)) % 5 == 4) == (split == "test")
    return scans[kept].reshape(-1, SIDE, SIDE).astype(np.uint8), labels[kept]


class Scans(NamedTuple):
    """Handwritten digits, sorted by label.

    Args:
        ink: 0 to 1.
        first: index of each label's first scan, then the number of scans.
    """

    ink: Float[np.ndarray, "n 8 8"]
    first: Int[np.ndarray, " 11"]

    @classmethod
    def of(cls, split: Split) -> Scans:
        """Load one split: "train", or "test", which no model is trained on."""
        scans, labels = load(split)
        first = np.cumsum([0, *np.bincount(labels, minlength=10)])
        return cls((scans[np.argsort(labels, kind="stable")] / INK).astype(np.float32), first)


# ---- clips, made on the device -------------------------------------------------------------------


class Clip(NamedTuple):
    """The content of clips.

    Args:
        digit, way: as in the prompt.
        scan: number of the handwritten digit.
        before: number of a scan of another digit, for clips whose prompt changes.
        start: pixels between the edge and the digit in the first frame, along its movement.
    """

    digit: Int[Array, " B"]
    way: Int[Array, " B"]
    scan: Int[Array, " B"]
    before: Int[Array, " B"]
    start: Int[Array, " B"]


def draw(seed: int, clips: Int[Array, " B"], first: Int[np.ndarray, " 11"], data: ClipData) -> Clip:
    """Draw the content of clips.

    Args:
        seed: shared by all clips.
        clips: numbers of the clips.
        first: `Scans.first`.
        data: canvas, and the places that a digit may start from.
    """

    def one(clip: Array) -> Clip:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), clip), 6)
        digit, way, other, *place = (
            jax.random.randint(key, (), 0, most)
            for key, most in zip(keys, (10, 4, 9, 2**20, 2**20, 2**20), strict=True)
        )
        ends, others = jnp.asarray(first), (digit + 1 + other) % 10
        scan, before = (
            ends[label] + drawn % (ends[label + 1] - ends[label])
            for label, drawn in zip((digit, others), place, strict=False)
        )
        starts = -(-data.canvas // data.start_every)
        return Clip(digit, way, scan, before, place[2] % starts * data.start_every)

    return jax.vmap(one)(clips)


def render(
    scans: Float[Array, "B 8 8"], clip: Clip, data: ClipData, frames: int
) -> Float[Array, "B F H W"]:
    """Render scans that move as the clips require, -1 (paper) to 1 (ink)."""
    room, canvas = data.canvas - SIDE, data.canvas
    pad = (0, 0), (0, room), (0, room)
    at, step = jnp.arange(canvas), jnp.asarray(STEPS)[clip.way]  # [B, 2]
    lane = jnp.full_like(clip.start, room // 2)
    first = jnp.where(step != 0, clip.start[:, None], lane[:, None])
    moved = first[:, None] + data.speed * jnp.arange(frames)[:, None] * step[:, None]  # [B, F, 2]
    rows, columns = (jnp.mod(at - moved[..., axis, None], canvas) for axis in (0, 1))
    each = jnp.arange(len(scans))[:, None, None, None]
    return 2 * jnp.pad(scans, pad)[each, rows[..., None], columns[..., None, :]] - 1


def to_latents(video: Float[Array, "B F H W"]) -> Float[Array, "B F h w C"]:
    """Turn the pixels of each square into channels."""
    return rearrange(video, "B F (h y) (w x) -> B F h w (y x)", y=SQUARE, x=SQUARE)


def to_ink(latents: Float[np.ndarray, "B F h w C"]) -> Float[np.ndarray, "B F H W"]:
    """Undo `to_latents`; return ink from 0 to 16."""
    video = rearrange(np.asarray(latents), "B F h w (y x) -> B F (h y) (w x)", y=SQUARE, x=SQUARE)
    return np.clip((video + 1) * (INK / 2), 0.0, INK)


def places(frames: int, block: int, canvas: int) -> Float[np.ndarray, "F h w P"]:
    """Return channels that encode a token's frame within its block, its row and its column.

    In pure noise all tokens are alike, and RoPE encodes only distances: without these channels, a
    model learns to tell left from right late or never.
    """
    side, twice = canvas // TOKEN, canvas // SQUARE
    row = np.eye(side)[np.arange(twice) * SQUARE // TOKEN]
    shape = (frames, twice, twice)
    frame = np.broadcast_to(
        np.eye(block)[np.arange(frames) % block][:, None, None], (*shape, block)
    )
    rows = np.broadcast_to(row[:, None], (*shape, side))
    columns = np.broadcast_to(row[None, :], (*shape, side))
    return np.concatenate([frame, rows, columns], -1).astype(np.float32)


# ---- training by forcing -------------------------------------------------------------------------


def switched(
    key: Array, video: Array, before: Array, share: Float[Array, " B"], stream: ma.Stream
) -> Array:
    """In some clips, show another digit in the frames before a random block.

    After a change of prompt, a rollout recomputes the frames in its cache under the new prompt: a
    block then attends to frames of the old digit, or of both.

    Args:
        video: clips of the prompts' digits.
        before: clips of other digits, at the same places.
        share: probability of a change, for each clip.
        stream: gives the blocks; a change is never before the first one.
    """
    count, frames = video.shape[:2]
    for_some, for_block = jax.random.split(key)
    starts = jnp.asarray([start for start, _ in stream.blocks(frames)][1:])
    at = jax.random.choice(for_block, starts, (count, 1))
    old = jax.random.bernoulli(for_some, share[:, None]) & (jnp.arange(frames) < at)
    return jnp.where(old[..., None, None, None], before, video)


def turned(
    key: Array, shape: Sequence[int], turn: int, most: int, stream: ma.Stream
) -> Int[Array, "B F"]:
    """In some clips, number the frames after the sink as if whole turns of the torus had passed.

    In a long video the sink is far away. After a turn a digit is back at its place, so short clips
    can teach a sink at any distance.

    Args:
        shape: clips and frames.
        turn: frames in which a digit comes back to its place.
        most: largest number of frames to skip.
        stream: gives the sink.
    """
    for_turns, for_some = jax.random.split(key)
    turns = jax.random.randint(for_turns, (shape[0], 1), 0, most // turn + 1)
    some = jax.random.bernoulli(for_some, TURNED, (shape[0], 1))
    frame = jnp.arange(shape[1])
    return frame + jnp.where((frame >= stream.sink) & some, turn * turns, 0)


# ---- where ink is, counted around ----------------------------------------------------------------


def centre(frames: Frames) -> Float[np.ndarray, "... 2"]:
    """Return row and column of the centre of ink: the phase of the first Fourier coefficient."""
    size = frames.shape[-1]
    waves = np.exp(2j * np.pi * np.arange(size) / size)
    both = (frames.sum(-1) * waves).sum(-1), (frames.sum(-2) * waves).sum(-1)
    return np.angle(np.stack(both, axis=-1)) * size / (2 * np.pi)


def apart(pixels: Float[np.ndarray, "..."], size: int) -> Float[np.ndarray, "..."]:
    """Return distances the short way around the torus, from -size/2 to size/2."""
    return (pixels + size / 2) % size - size / 2


def unrolled(frames: Frames) -> Frames:
    """Roll every frame so that its centre of ink is in the middle of the canvas."""
    size = frames.shape[-1]
    flat = frames.reshape(-1, size, size)
    shifts = np.round((size - 1) / 2 - centre(flat)).astype(int)
    moved = [np.roll(frame, by, (0, 1)) for frame, by in zip(flat, shifts, strict=True)]
    return np.stack(moved).reshape(frames.shape)
