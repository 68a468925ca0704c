"""A clean clip and a noisy one in one sequence, in the order that `TeacherForcing` counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from maxattn.config.numbers import LARGEST, whole
from maxattn.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


def pair(clean: Shaped[Array, "..."], noisy: Shaped[Array, "..."], shards: int, axis: int) -> Array:
    """Deal both clips to shards, in each the clean part first; arguments as `Stream.pair`."""
    size = _size("clean", clean, axis)
    _size("noisy", noisy, axis)
    if tuple(clean.shape) != tuple(noisy.shape):
        rule = f"the clean clip and the noisy one have one shape, and clean has {clean.shape}"
        raise InputError("noisy", f"shape {tuple(noisy.shape)}", rule, "add noise to clean")
    _check_shards(shards, size, "a clip")
    parts = zip(*(jnp.split(x, shards, axis) for x in (clean, noisy)), strict=True)
    return jnp.concatenate([x for both in parts for x in both], axis)


def unpair(both: Shaped[Array, "..."], shards: int, axis: int) -> tuple[Array, Array]:
    """Take both clips apart again; arguments as `Stream.unpair`."""
    size = _size("both", both, axis)
    if size % 2:
        rule = f"the clean clip and the noisy one have one length, and axis {axis} has {size}"
        remedy = "give what stream.pair made, or what attention made of it"
        raise InputError("both", f"shape {tuple(both.shape)}", rule, remedy)
    _check_shards(shards, size // 2, "each clip")
    parts = jnp.split(both, 2 * shards, axis)
    return jnp.concatenate(parts[::2], axis), jnp.concatenate(parts[1::2], axis)


def _size(name: str, x: Any, axis: Any) -> int:
    """Return the tokens or frames of a clip, and refuse what has none."""
    if not hasattr(x, "shape"):
        rule = "a clip is an array: tokens, rotary angles or times of frames"
        raise InputError(name, type(x).__name__, rule, "make it one with jnp.asarray")
    axes = len(x.shape)
    if whole(axis, -LARGEST) is None or not -axes <= axis < axes:
        rule = f"{name} has the axes 0 to {axes - 1}" if axes else f"{name} is a number"
        raise InputError("axis", repr(axis), rule, "give the axis of tokens or frames")
    return x.shape[axis]


def _check_shards(shards: Any, size: int, clip: str) -> None:
    if whole(shards) is None or size % shards:
        rule = f"shards divide the {size} tokens or frames of {clip}"
        raise InputError("shards", repr(shards), rule, "give the devices of the context axis")
