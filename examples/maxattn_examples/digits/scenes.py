"""The content of clips: which digits a clip shows, their colours, and how they move.

A clip is a function of a seed and its number. Its digits and their colours differ.

    bouncing    the digit turns back at the edges
    leaving     the digit leaves the picture, stays away, and comes back to its first place
    crossing    the digit moves from one edge to the other; two meet in one lane
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .torus import SIDE, Scans
from .words import COLOURS, SCENES, STEPS

MOST = SCENES.most
BOUNCING, LEAVING, CROSSING = range(3)
NONE = -1
KINDS = np.array(
    [
        (CROSSING, CROSSING, NONE),
        (CROSSING, CROSSING, LEAVING),
        (CROSSING, CROSSING, BOUNCING),
        (LEAVING, LEAVING, NONE),
        (LEAVING, BOUNCING, NONE),
        (BOUNCING, LEAVING, LEAVING),
        (LEAVING, BOUNCING, BOUNCING),
    ]
)
GONE = 0.25  # of the way to the middle of a clip and back, a digit that leaves is out of sight


class Size(NamedTuple):
    """The sizes of a clip.

    Args:
        frames: of a clip.
        height, width: pixels of a frame.
        digit: pixels along a side of a digit.
    """

    frames: int
    height: int
    width: int
    digit: int

    @property
    def room(self) -> Float[np.ndarray, " 2"]:
        """The largest row and column of a digit's corner."""
        return np.array([self.height - self.digit, self.width - self.digit], np.float32)


class Scene(NamedTuple):
    """The digits of clips; the first ones are drawn in front.

    Args:
        there: whether the clip has this digit.
        colour, digit, path, way: as in the prompt.
        scan: number of the handwritten digit.
        start: row and column of the corner in the first frame.
        speed: pixels per frame, at first.
    """

    there: Bool[Array, "B K"]
    colour: Int[Array, "B K"]
    digit: Int[Array, "B K"]
    path: Int[Array, "B K"]
    way: Int[Array, "B K"]
    scan: Int[Array, "B K"]
    start: Float[Array, "B K 2"]
    speed: Float[Array, "B K 2"]

    @property
    def numbers(self) -> Int[Array, "B K groups"]:
        """The prompts as numbers of words, in the form that `SCENES.states` takes."""
        said = jnp.stack([self.colour, self.digit, self.path, self.way], -1)
        return jnp.where(self.there[..., None], said, -1)

    def prompts(self) -> list[str]:
        """Write the prompts."""
        said, there = np.asarray(self.numbers), np.asarray(self.there)
        rows = zip(said, there, strict=True)
        return [SCENES.prompt_of(row[on].tolist()) for row, on in rows]


def draw(seed: int, clips: Int[Array, " B"], scans: Scans, size: Size) -> Scene:
    """Draw the content of clips.

    Args:
        seed: shared by all clips.
        clips: numbers of the clips.
        scans: the digits to choose from.
    """
    key = jax.random.key(seed)
    return jax.vmap(lambda clip: _one(jax.random.fold_in(key, clip), scans, size))(clips)


def _one(key: Array, scans: Scans, size: Size) -> Scene:
    for_kind, for_colour, for_digit, for_way, for_scan, for_place = jax.random.split(key, 6)
    path = jnp.asarray(KINDS)[jax.random.randint(for_kind, (), 0, len(KINDS))]
    crosses, there = path[0] == CROSSING, path != NONE
    colour = jax.random.permutation(for_colour, len(COLOURS))[:MOST]
    digit = jax.random.permutation(for_digit, 10)[:MOST]
    way = jax.random.randint(for_way, (MOST,), 0, len(STEPS))
    way = way.at[1].set(jnp.where(crosses, way[0] ^ 1, way[1]))  # the opposite of the first's
    first = jnp.asarray(scans.first)
    scan = jax.random.uniform(for_scan, (MOST,)) * (first[digit + 1] - first[digit])
    drawn = jax.random.uniform(for_place, (MOST, 4))
    drawn = drawn.at[1, 2].set(jnp.where(crosses, drawn[0, 2], drawn[1, 2]))  # one lane
    start, speed = jax.vmap(partial(_movement, size=size))(path, way, drawn)
    scan = first[digit] + scan.astype(jnp.int32)
    return Scene(there, colour, digit, path, way, scan, start, speed)


def _movement(
    path: Array, way: Array, drawn: Float[Array, " 4"], size: Size
) -> tuple[Float[Array, " 2"], Float[Array, " 2"]]:
    """Return a digit's first corner and its speed.

    Distances along the movement are from the edge at which it starts.
    """
    step, room = jnp.asarray(STEPS)[way], jnp.asarray(size.room)
    along = jnp.abs(step)
    far, middle = (along * room).sum(), (size.frames - 1) / 2
    place, fast, lane, aside = drawn
    # A digit that leaves is at the edge's other side when GONE of the time is left to the middle.
    out = far * (0.2 + 0.25 * place)
    begins = jnp.stack([0.6 * far * place, far - out, 0.15 * far * place])[path]
    end = far * (0.85 + 0.15 * fast)
    speeds = jnp.stack(
        [
            far * (0.72 + 0.48 * fast) / (size.frames - 1),
            (out + size.digit) / ((1 - GONE) * middle),
            (end - begins) / (size.frames - 1),
        ]
    )[path]
    drift = (aside - 0.5) * 0.08 * room * 12 / (size.frames - 1)
    across = jnp.where(path == BOUNCING, drift, 0.0)
    from_edge = jnp.where(step.sum() > 0, begins, far - begins)
    start = jnp.where(along > 0, from_edge, lane * room)
    return start, jnp.where(along > 0, step * speeds, across)


def corners(scene: Scene, size: Size) -> Float[Array, "B K F 2"]:
    """Return the row and column of every digit's corner in every frame."""
    room, t = jnp.asarray(size.room), jnp.arange(size.frames, dtype=jnp.float32)[:, None]
    middle = (size.frames - 1) / 2
    start, speed = scene.start[..., None, :], scene.speed[..., None, :]
    ahead = start + speed * t
    turned = jnp.mod(ahead, 2 * room)
    bounced = jnp.minimum(turned, 2 * room - turned)
    returned = start + speed * (middle - jnp.abs(t - middle))
    path = scene.path[..., None, None]
    return jnp.where(path == BOUNCING, bounced, jnp.where(path == LEAVING, returned, ahead))


# ---- rendering: two small matrix products a digit and frame --------------------------------------

Clips = Float[Array, "B F H W 3"]


@partial(jax.jit, static_argnames="size")
def render(scene: Scene, ink: Float[Array, "n 8 8"], size: Size) -> Clips:
    """Render clips, colours from 0 to 1.

    Args:
        ink: of all scans, 0 to 1.
    """
    at = corners(scene, size)
    rows = _weights(at[..., 0], size.height, size.digit)
    columns = _weights(at[..., 1], size.width, size.digit)
    exact = jax.lax.Precision.HIGHEST
    drawn = jnp.einsum("bkfhi,bkij,bkfwj->bkfhw", rows, ink[scene.scan], columns, precision=exact)
    cover = jnp.clip(1.3 * drawn, 0, 1) * scene.there[..., None, None, None]
    colours = jnp.asarray(np.array(list(COLOURS.values()), np.float32))[scene.colour]
    picture = jnp.zeros((*cover[:, 0].shape, 3))
    for k in reversed(range(MOST)):  # the first ones are in front
        over = cover[:, k, ..., None]
        picture = (1 - over) * picture + over * colours[:, k, None, None, None]
    return picture


def _weights(corner: Float[Array, "B K F"], pixels: int, digit: int) -> Float[Array, "B K F P 8"]:
    """Return the interpolation weights from a scan's pixels to one side of the frame."""
    middle = (jnp.arange(pixels) + 0.5 - corner[..., None]) / (digit / SIDE) - 0.5
    return jnp.maximum(0, 1 - jnp.abs(middle[..., None] - jnp.arange(SIDE)))


def to_model(clips: Clips) -> Clips:
    """Scale colours to the model's range, -1 to 1."""
    return 2 * clips - 1


def of_model(samples: Clips) -> Clips:
    """Scale samples to colours from 0 to 1, clipped."""
    return jnp.clip((samples + 1) / 2, 0, 1)


def scans_here(scans: Scans) -> Float[Array, "n 8 8"]:
    """Put the ink of scans on the device."""
    return jnp.asarray(scans.ink)
