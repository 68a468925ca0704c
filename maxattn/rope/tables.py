"""Rotary tables for positions in one, two and three dimensions.

Tables are numpy arrays, computed in float64 on the host and rounded to float32. If a video's frame
numbers are traced, the table is computed on the device instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxattn.config.numbers import is_number, whole
from maxattn.errors import InputError, brief, did_you_mean
from maxattn.jax_private.mesh import is_tracer
from maxattn.masks.data import of_list

STYLES = ("interleaved", "half")
BITS, DIGITS = 8, 4  # four digits of 8 bits give every int32 of at least 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotary:
    """A table with the cosine and sine of a rotary embedding for each token and channel pair.

    A pair of channels (a, b) becomes (a cos - b sin, a sin + b cos).

    Args:
        cos: float32, [T, H/2]; [B, T, H/2] if examples have different positions; [B, T, N, H/2] if
            heads have different angles.
        sin: float32, of the shape of cos.
        style: which channels are a pair: 2i and 2i + 1 for "interleaved" (Wan, Flux; default), i
            and i + H/2 for "half" (LLaMA).
        partial: whether only the first R channels of a head are rotated; default False. The table
            is then R/2 wide, and pairs of the half style are i and i + R/2.

    Raises:
        InputError: if the style is unknown.

    >>> first_8 = ma.rope_1d(8, length=16)
    >>> table = ma.Rotary(first_8.cos, first_8.sin, partial=True)
    >>> ma.apply_rotary(jnp.ones((1, 16, 2, 12)), table).shape
    (1, 16, 2, 12)
    """

    cos: Any
    sin: Any
    style: str = field(default="interleaved", metadata={"static": True})
    partial: bool = field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            rule = f"a rotary style must be one of {', '.join(STYLES)}"
            which = "use 'interleaved' for Wan and Flux, 'half' for LLaMA"
            remedy = did_you_mean(str(self.style), STYLES) or which
            raise InputError("style", self.style, rule, remedy)

    def split(self, tokens: int) -> tuple[Rotary, Rotary]:
        """Split the table into a table of the first tokens and a table of the other tokens.

        Args:
            tokens: the number of first tokens, 0 to T.

        Raises:
            InputError: if the table does not have so many tokens.

        >>> text, picture = ma.rope_1d(8, length=10).split(3)
        >>> text.cos.shape, picture.cos.shape
        ((3, 4), (7, 4))
        """
        length = self.cos.shape[0 if self.cos.ndim == 2 else 1]
        if whole(tokens, 0, length) is None:
            rule = f"the table has {length} tokens"
            raise InputError("tokens", brief(tokens), rule, f"give 0 to {length}")
        return self._tokens(slice(tokens)), self._tokens(slice(tokens, None))

    def _tokens(self, some: slice) -> Rotary:
        at = some if self.cos.ndim == 2 else (slice(None), some)
        return replace(self, cos=self.cos[at], sin=self.sin[at])


def rope_1d(
    head_dim: int, length: int, theta: float = 1e4, *, style: str = "interleaved"
) -> Rotary:
    """Make the rotary table of the positions 0 to length - 1.

    angle[t, i] = t * theta ** (-2 i / head_dim)

    Args:
        head_dim: H, even.
        length: T.
        theta: base of the frequencies, default 10,000.
        style: "interleaved" (default) or "half".

    Returns:
        cos and sin [T, H/2].

    Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864

    >>> table = ma.rope_1d(64, 4096)
    >>> table.cos.shape, float(table.cos[0, 0])
    ((4096, 32), 1.0)
    """
    return rope_nd((head_dim,), _grid(length=length), theta, style=style)


def rope_2d(
    head_dim: int, height: int, width: int, theta: float = 1e4, *, style: str = "interleaved"
) -> Rotary:
    """Make the rotary table of a picture's patches in raster order.

    Half of the channels rotate by a patch's row, the other half by its column.

    Args:
        head_dim: H, a multiple of 4.
        height, width: number of patches in each direction; T = height * width.
        theta: base of the frequencies, default 10,000.
        style: "interleaved" (default) or "half".

    Returns:
        cos and sin [T, H/2], the row angles first.

    >>> ma.rope_2d(64, height=32, width=48).cos.shape
    (1536, 32)
    """
    if head_dim % 4:
        rule = "two axes of channel pairs need a head dim that is a multiple of 4"
        raise InputError("head_dim", head_dim, rule, "use a multiple of 4")
    return rope_nd((head_dim // 2,) * 2, _grid(height=height, width=width), theta, style=style)


def rope_3d(
    head_dim: int,
    frames: int | Int[Array, "*b F"] | Int[np.ndarray, "*b F"],
    height: int,
    width: int,
    theta: float = 1e4,
    *,
    style: str = "interleaved",
) -> Rotary:
    """Make the rotary table of a video's patches, frame by frame in raster order.

    The channels are split over time, height and width as Wan splits them.

    Args:
        head_dim: H, even, at least 6. Height and width have 2 * (H // 6) channels each, and time
            has all other channels.
        frames: the number of frames; or an integer array of frame numbers, 0 or more, [F], or
            [B, F] if examples differ. Frame numbers may be traced: one program then computes every
            block of a video, with angles as exact at frame 1,000,000 as at frame 0. A traced number
            below 0 cannot be refused: its angles are NaN.
        height, width: number of a frame's patches in each direction; T = frames * height * width.
        theta: base of the frequencies, default 10,000.
        style: "interleaved" (default) or "half".

    Returns:
        cos and sin [T, H/2] or [B, T, H/2]: the angles of time, then of height, then of width.

    Source: Wan 2.1, https://arxiv.org/abs/2503.20314

    >>> ma.rope_3d(128, frames=21, height=30, width=52).cos.shape
    (32760, 64)
    >>> block = ma.rope_3d(128, frames=np.array([3, 4, 5]), height=30, width=52)
    >>> block.cos.shape
    (4680, 64)
    """
    if isinstance(frames, int | np.integer):
        grid = _grid(frames=frames, height=height, width=width)
        return rope_nd(split_3d(head_dim), grid, theta, style=style)
    numbers = of_list(frames, "frames")
    rule = "it must be the number of frames, or frame numbers: integers >= 0, [F] or [B, F]"
    remedy = "give an integer, or an array of integers such as cache.frame + jnp.arange(3)"
    if numbers.ndim not in (1, 2) or not numbers.size or numbers.dtype.kind not in "iu":
        found = f"{numbers.dtype} of shape {tuple(numbers.shape)}"
        raise InputError("frames", found, rule, remedy)
    if is_tracer(numbers):
        return _of_traced_frames(head_dim, numbers, (height, width), theta, style)
    if numbers.min() < 0:
        raise InputError("frames", int(numbers.min()), rule, remedy)
    rows = _grid(height=height, width=width)
    shape = (*numbers.shape, len(rows))
    time = np.broadcast_to(numbers[..., None, None], (*shape, 1))
    positions = np.concatenate([time, np.broadcast_to(rows, (*shape, 2))], -1)
    positions = positions.reshape(*numbers.shape[:-1], -1, 3)  # [T, 3] or [B, T, 3]
    return rope_nd(split_3d(head_dim), positions, theta, style=style)


def _of_traced_frames(
    head_dim: int, numbers: Array, sides: tuple[int, int], theta: float, style: str
) -> Rotary:
    channels, _, _ = split_3d(head_dim)
    frequencies = _angles(np.ones(()), channels, _checked_theta(theta))
    still = rope_3d(head_dim, 1, *sides, theta, style=style)  # the table of frame 0
    parts: list[Array] = []
    for turned, full in zip(cos_sin(numbers, frequencies), (still.cos, still.sin), strict=True):
        turned = jnp.where(numbers[..., None] >= 0, turned, jnp.nan)
        space = full[:, channels // 2 :]
        shape = (*numbers.shape, len(space))
        time = jnp.broadcast_to(turned[..., None, :], (*shape, channels // 2))
        both = [time, jnp.broadcast_to(space, (*shape, space.shape[1]))]
        each = jnp.concatenate(both, -1)  # [*B, F, h w, H/2]
        parts.append(each.reshape(*numbers.shape[:-1], -1, head_dim // 2))
    cos, sin = parts
    return Rotary(cos, sin, style)


def cos_sin(
    positions: Int[Array, "..."], frequencies: Float[np.ndarray, " P"]
) -> tuple[Float[Array, "... P"], Float[Array, "... P"]]:
    """Return the cosine and sine of positions * frequencies in float32, as exact as on the host.

    Positions are integers of at least 0 and may be traced; the angles per position are float64.
    A float32 product, with 24 bits, would be off by 0.008 at position 100,000. So each position is
    split into digits. The cosine and sine of each digit's angle come from a float64 table, and the
    addition formulas give the cosine and sine of the sum.
    """
    positions = positions.astype(jnp.int32)
    cos: Any = None
    sin: Any = None
    for shift in range(0, BITS * DIGITS, BITS):
        values = np.arange(1 << BITS, dtype=np.float64) * float(1 << shift)
        angles = values[:, None] * frequencies
        at = jax.lax.shift_right_logical(positions, np.int32(shift)) & ((1 << BITS) - 1)
        c, s = (jnp.asarray(f(angles).astype(np.float32))[at] for f in (np.cos, np.sin))
        # A digit of 0 has c = 1 and s = 0: it changes no bit of the result.
        cos, sin = (c, s) if cos is None else (cos * c - sin * s, sin * c + cos * s)
    return cos, sin


def split_3d(head_dim: int) -> tuple[int, int, int]:
    """Split the channels of a head between time, height and width: 128 -> (44, 42, 42)."""
    if head_dim < 6 or head_dim % 2:
        rule = "three axes of channel pairs need an even head dim of at least 6"
        raise InputError("head_dim", head_dim, rule, "use an even number of at least 6")
    space = 2 * (head_dim // 6)
    return head_dim - 2 * space, space, space


def rope_nd(
    sizes: Sequence[int],
    positions: Float[np.ndarray, "*b T axes"],
    theta: float = 1e4,
    *,
    style: str = "interleaved",
) -> Rotary:
    """Make the rotary table of any positions; each axis of a position rotates separate channels.

    Args:
        sizes: number of channels of each axis, all even; their sum is H.
        positions: finite numbers, [T, axes] or [B, T, axes].
        theta: base of the frequencies, default 10,000.
        style: "interleaved" (default) or "half".

    Returns:
        cos and sin [T, H/2] or [B, T, H/2]: the angles of the first axis, then of the next.

    Raises:
        InputError: if sizes or positions do not fit, or an angle is not finite.
    """
    positions, theta = _checked_positions(positions, len(sizes)), _checked_theta(theta)
    each = [_angles(positions[..., i], d, theta) for i, d in enumerate(sizes)]
    angles = np.concatenate(each, axis=-1)
    if not np.isfinite(angles).all():
        rule = "the angles, positions * theta ** (-2 i / channels), must be finite"
        raise InputError("theta", repr(theta), rule, "leave theta out to use 10,000")
    return Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), style)


def _checked_positions(positions: Any, axes: int) -> np.ndarray:
    if is_tracer(positions := of_list(positions, "positions")):
        rule = "positions are read on the host, and these are traced"
        remedy = "make the table outside of jit and pass it in, or use rope_3d for traced frames"
        raise InputError("positions", f"traced, of shape {positions.shape}", rule, remedy)
    positions = np.asarray(positions, np.float64)
    if positions.ndim not in (2, 3) or positions.shape[-1] != axes:
        rule = f"it must be [T, {axes}] or [B, T, {axes}], one column per axis"
        remedy = "give one position per token and axis"
        raise InputError("positions", f"shape {positions.shape}", rule, remedy)
    if not np.isfinite(positions).all():
        rule = "a position must be finite: the cosine of infinity is NaN"
        raise InputError("positions", "NaN or infinite", rule, "give padding tokens position 0")
    return positions


def _checked_theta(theta: Any) -> float:
    if not is_number(theta) or not 0 < theta < np.inf:
        rule = "the base of the frequencies must be a positive, finite number"
        raise InputError("theta", repr(theta), rule, "leave theta out to use 10,000")
    return float(theta)


def _angles(positions: np.ndarray, channels: int, theta: float) -> np.ndarray:
    if channels <= 0 or channels % 2:
        rule = "channels rotate in pairs, so each axis needs an even number of channels"
        raise InputError("head_dim", channels, rule, "use an even number of channels per axis")
    with np.errstate(over="ignore", invalid="ignore"):  # `rope_nd` refuses infinite angles
        frequencies = theta ** (-np.arange(0, channels, 2, dtype=np.float64) / channels)
        return positions[..., None] * frequencies


def _grid(**sizes: Any) -> np.ndarray:
    """List the positions of a grid in raster order: [T, axes]."""
    for name, size in sizes.items():
        try:
            sizes[name] = 0 if isinstance(size, bool) else index(size)
        except (TypeError, jax.errors.JAXTypeError):
            sizes[name] = 0
        if sizes[name] < 1:
            rule = "it must be a whole number of at least 1, known before tracing"
            raise InputError(name, brief(size), rule, "give every axis at least one position")
    axes = np.meshgrid(*(np.arange(n) for n in sizes.values()), indexing="ij")
    return np.stack(axes, -1).reshape(-1, len(sizes))
