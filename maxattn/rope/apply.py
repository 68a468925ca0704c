"""Rotate heads by a table of angles, and read the forms in which models store such tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxattn.errors import InputError
from maxattn.jax_private.mesh import is_tracer
from maxattn.masks.operands import check_not_torch, check_values
from maxattn.rope.tables import Rotary


def apply_rotary(
    x: Float[Array, "B T N H"], rotary: Any, name: str = "rotary_emb"
) -> Float[Array, "B T N H"]:
    """Rotate the channel pairs of each head by the angles of its token.

    (a, b) -> (a cos - b sin, a sin + b cos), computed in float32 and rounded to the dtype of x.

    Args:
        x: queries or keys [B, T, N, H].
        rotary: the angles, in one of three forms: a `Rotary`, an array of complex numbers
            cos + i sin, or a pair (cos, sin). Complex numbers and pairs rotate channels 2i and
            2i + 1 together (interleaved). Arrays are [T, D], [B, T, D], [B, T, 1, D] or
            [B, 1, T, D], or [B, T, N, D] if heads have different angles. B may be 1. D is H/2, or
            less in a partial `Rotary`. A pair may also have D = H, with each number twice: c0, c0,
            c1, c1, ... A pair in another order is refused, and so is one whose numbers cannot be
            read (traced by `jit`, or split over several hosts).
        name: the argument's name for errors, default "rotary_emb".

    Returns:
        The rotated x, [B, T, N, H].

    Raises:
        InputError: if the table does not fit x.

    >>> q = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
    >>> ma.apply_rotary(q, ma.rope_1d(8, length=16)).shape
    (1, 16, 2, 8)
    """
    check_values("x", x)
    table = as_rotary(rotary, x.shape, name)
    both = (jnp.asarray(part, jnp.float32) for part in (table.cos, table.sin))
    # [T, D] or [B, T, D] -> [B, T, 1, D]; [B, T, N, D] is kept
    cos, sin = (a if a.ndim == 4 else a.reshape(-1, x.shape[1], 1, a.shape[-1]) for a in both)
    rotate = _rotate_half if table.style == "half" else _rotate_interleaved
    turned = 2 * cos.shape[-1]
    y = rotate(jnp.asarray(x[..., :turned], jnp.float32), cos, sin).astype(x.dtype)
    return y if turned == x.shape[-1] else jnp.concatenate((y, x[..., turned:]), axis=-1)


def as_rotary(value: Any, shape: Sequence[int], name: str = "rotary_emb") -> Rotary:
    """Convert a table in any form that `apply_rotary` takes to a `Rotary`, and check that it fits.

    Args:
        value, name: `rotary` and `name` of `apply_rotary`.
        shape: the shape of the queries or keys, (B, T, N, H).

    Returns:
        A table whose arrays are [T, D], [B, T, D], or [B, T, N, D] if heads have different angles.

    Raises:
        InputError: if the table does not fit the shape.
    """
    if shape[-1] % 2:
        rule = f"{name} rotates pairs of channels, so dim_head must be even"
        raise InputError("dim_head", shape[-1], rule, "use an even dim_head")
    check_values(name, value)
    table = _read(value, shape[-1], name)
    cos, sin = (_fitting(part, shape, name, table.partial) for part in (table.cos, table.sin))
    return replace(table, cos=cos, sin=sin)


def _read(value: Any, head_dim: int, name: str) -> Rotary:
    if isinstance(value, Rotary):
        return value
    if isinstance(value, tuple | list):
        if len(value) == 2 and all(hasattr(part, "shape") for part in value):
            return Rotary(*(_once(part, head_dim, name) for part in value))
        found = f"{type(value).__name__} of {len(value)}"
    elif not hasattr(value, "dtype"):
        found = type(value).__name__
    elif jnp.issubdtype(value.dtype, jnp.complexfloating):
        return Rotary(value.real, value.imag)
    else:
        found = f"{value.dtype} array of shape {tuple(value.shape)}"
    rule = "it must be a Rotary, an array of complex numbers, or a pair (cos, sin)"
    remedy = "make it with maxattn.rope.rope_1d, rope_2d or rope_3d"
    remedy += "; text or an image's tokens go to CrossAttention" if "array" in found else ""
    raise InputError(name, found, rule, remedy)


def _once(part: Any, head_dim: int, name: str) -> Any:
    """Drop every second number of a cos or sin that has each number twice.

    A table of the half style, or for heads of twice the size, has the same width but another order.
    It is refused, and so is a table whose numbers this process cannot read.
    """
    if not part.shape or part.shape[-1] != head_dim:
        return part
    rule = "a table as wide as the head dim must have each number twice: c0, c0, c1, c1"
    remedy = "make it with maxattn.rope, or pass Rotary(cos, sin, style='half') of width H/2"
    if is_tracer(part):  # tested first: a tracer has no attribute `is_fully_addressable`
        numbers = None
    elif getattr(part, "is_fully_addressable", True):
        numbers = np.asarray(part)
    else:
        numbers = np.asarray(part.addressable_data(0)) if part.is_fully_replicated else None
    if numbers is None:
        rule += ", and numbers that are traced or on other hosts cannot be compared"
        remedy = "for c0, c0, c1, c1, ... pass Rotary(cos[..., ::2], sin[..., ::2]); for LLaMA's"
        half = f"..., :{head_dim // 2}"
        remedy += f" order Rotary(cos[{half}], sin[{half}], style='half')"
    elif np.array_equal(numbers[..., ::2], numbers[..., 1::2]):
        return part[..., ::2]
    raise InputError(name, f"(cos, sin) of width {head_dim}", rule, remedy)


def _fitting(part: Any, shape: Sequence[int], name: str, partial: bool) -> Any:
    """Drop a heads axis of size 1 from a cos or sin, and refuse a table that does not fit."""
    b, t, n, h = shape
    dtype = getattr(part, "dtype", type(part).__name__)
    check_not_torch(name, str(dtype))
    if isinstance(dtype, str) or not jnp.issubdtype(dtype, jnp.floating):
        rule = "cos and sin must be floating arrays, not angles, positions or complex numbers"
        remedy = "make it with maxattn.rope, or pass cos + i sin as one complex array"
        raise InputError(name, f"cos or sin of {dtype}", rule, remedy)
    if part.ndim == 4 and 1 in (of := part.shape[1:3]) and (of != (t, n) or n == 1):
        part = part.reshape(part.shape[0], part.shape[1] * part.shape[2], part.shape[3])
    *dims, width = part.shape or (0,)
    wide = width == h // 2 if not partial else 0 < 2 * width < h
    if wide and tuple(dims) in ((t,), (1, t), (b, t), (1, t, n), (b, t, n)):
        return part
    d = f"fewer than {h // 2}" if partial else f"{h // 2}"
    fits = f"[{t}, {d}], [{b}, {t}, {d}] or [{b}, {t}, {n}, {d}]; batch and heads may be 1"
    rule = f"for {t} tokens and head dim {h} it must be {fits}"
    remedy = "make the table for these tokens and this head dim, or slice a larger table"
    raise InputError(name, f"shape {tuple(part.shape)}", rule, remedy)


def _rotate_interleaved(x: Array, cos: Array, sin: Array) -> Array:
    # Each pair is swapped in place: XLA writes a stack of two halves at under half of a GPU's
    # memory bandwidth.
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    signs = jnp.array([-1.0, 1.0], jnp.float32).reshape((1,) * sin.ndim + (2,))
    signed = sin[..., None] * signs
    return (pairs * cos[..., None] + pairs[..., ::-1] * signed).reshape(x.shape)


def _rotate_half(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
