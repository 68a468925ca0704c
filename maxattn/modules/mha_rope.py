"""Rotary embeddings inside `nnx.MultiHeadAttention`: how an `attention_fn` turns its heads.

flax binds an `nnx.RoPE` to its attention function with `functools.partial`; `bound_rope` reads it
from there, and `turn` calls it as flax does, one head at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from maxattn.errors import InputError

Rope = Callable[..., Array]  # x [..., T, H] and positions [T] or None -> x, turned
_FLAX_ROPE = getattr(nnx, "dot_product_attention_with_rope", None)  # flax 0.12.8 has none


def bound_rope(fn: Any) -> Rope | None:
    """Return the rope of a partial of `nnx.dot_product_attention_with_rope`, and of nothing else.

    None too where the partial binds more than the rope, since that would be dropped.
    """
    if _FLAX_ROPE is None or not isinstance(fn, functools.partial) or fn.func is not _FLAX_ROPE:
        return None
    return fn.keywords["rope"] if not fn.args and set(fn.keywords) == {"rope"} else None


def why_unread(fn: Any) -> str:
    """Say why an attention function cannot be exchanged for one of maxattn's."""
    if isinstance(fn, functools.partial):
        bound = ", ".join([*("an argument" for _ in fn.args[:1]), *(f"{k}=" for k in fn.keywords)])
        what = f"a partial of {_name(fn.func)} that binds {bound or 'nothing'}"
        return f"{what}; swap reads nnx.dot_product_attention_with_rope with rope= alone"
    if fn is _FLAX_ROPE is not None:
        return "dot_product_attention_with_rope, and no rope= is bound to it"
    return f"{_name(fn)}, not flax's"


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def check_rope(rope: Any) -> None:
    """Refuse what cannot be called on heads."""
    if rope is not None and not callable(rope):
        rule = "it is called on heads [..., T, H] and, where there are any, positions [T]"
        raise InputError("rope", type(rope).__name__, rule, "pass nnx.RoPE(), or None")


def turn(
    rope: Rope | None,
    positions: Num[Array, "*b T"] | None,
    query: Float[Array, "*b T N H"],
    key: Float[Array, "*b S K H"],
) -> tuple[Array, Array]:
    """Turn queries and keys, each from position 0 on, or both by the given positions."""
    if rope is None:
        if positions is not None:
            rule = "this attention_fn has no rotary embedding that could turn heads by them"
            remedy = "make it with attention_fn(config, rope=nnx.RoPE()), or leave positions out"
            raise InputError("input_positions", _shape(positions), rule, remedy)
        return query, key
    if positions is None:
        by_head = jax.vmap(rope, in_axes=-2, out_axes=-2)
        return by_head(query), by_head(key)
    positions = jnp.asarray(positions)
    _check_positions(positions, query, key)
    return _by_position(rope, positions, query), _by_position(rope, positions, key)


def _by_position(rope: Rope, positions: Array, x: Array) -> Array:
    """Turn [..., T, N, H] by positions [..., T], each example by its own."""
    by_head = jax.vmap(rope, in_axes=(-2, None), out_axes=-2)
    if positions.ndim == 1:
        return by_head(x, positions)
    *batch, length = jnp.broadcast_shapes(x.shape[:-2], positions.shape)
    each = jnp.broadcast_to(positions, (*batch, length)).reshape(-1, length)
    return jax.vmap(by_head)(x.reshape(-1, *x.shape[-3:]), each).reshape(x.shape)


def _check_positions(positions: Array, query: Array, key: Array) -> None:
    """Refuse positions that do not name one place for each query and each key."""
    batch, t, s = query.shape[:-3], query.shape[-3], key.shape[-3]
    if t != s:
        rule = f"they turn queries and keys alike, and there are {t} queries and {s} keys"
        remedy = "leave them out, or turn queries and keys before attention"
        raise InputError("input_positions", _shape(positions), rule, remedy)
    lead = positions.shape[:-1]
    full = (1,) * (len(batch) - len(lead)) + lead
    fits = len(full) == len(batch) and all(a in (1, b) for a, b in zip(full, batch, strict=True))
    if not positions.ndim or positions.shape[-1] != t or not fits:
        rule = f"it must be [{t}], or broadcast to {(*batch, t)}"
        remedy = "give one position a token, the last axis being that of the tokens"
        raise InputError("input_positions", _shape(positions), rule, remedy)


def _shape(x: Any) -> str:
    return f"shape {tuple(jnp.shape(x))}"
