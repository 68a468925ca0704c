"""Rotary embeddings inside `nnx.MultiHeadAttention`.

flax binds an `nnx.RoPE` to its attention function with `functools.partial`. `bound_rope` reads
the rope from the partial, and `turn` calls the rope as flax does, one head at a time.
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
    """Return the rope of a partial of `nnx.dot_product_attention_with_rope`, or None.

    Also return None if the partial binds more than the rope, since `swap` would drop the rest.
    """
    if _FLAX_ROPE is None or not isinstance(fn, functools.partial) or fn.func is not _FLAX_ROPE:
        return None
    return fn.keywords["rope"] if not fn.args and set(fn.keywords) == {"rope"} else None


def why_unread(fn: Any) -> str:
    """Return why `swap` cannot exchange an attention function."""
    if isinstance(fn, functools.partial):
        bound = ", ".join([*("an argument" for _ in fn.args[:1]), *(f"{k}=" for k in fn.keywords)])
        what = f"a partial of {_name(fn.func)} that binds {bound or 'nothing'}"
        return f"{what}; only nnx.dot_product_attention_with_rope with rope= can be swapped"
    if fn is _FLAX_ROPE is not None:
        return "dot_product_attention_with_rope without a bound rope="
    return f"{_name(fn)}, not flax's"


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def check_rope(rope: Any) -> None:
    if rope is not None and not callable(rope):
        rule = "it must be a function of heads [..., T, H] and positions [T] or None"
        raise InputError("rope", type(rope).__name__, rule, "pass nnx.RoPE(), or None")


def turn(
    rope: Rope | None,
    positions: Num[Array, "*b T"] | None,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    batch: tuple[int, ...],
) -> tuple[Array, Array]:
    """Rotate queries and keys by positions, [T] or [*batch, T] folded into B; default 0, 1, ..."""
    if rope is None:
        if positions is not None:
            rule = "this attention_fn has no rotary embedding that could use positions"
            remedy = "use attention_fn(config, rope=nnx.RoPE()), or leave input_positions out"
            raise InputError("input_positions", _shape(positions), rule, remedy)
        return query, key
    if positions is None:
        by_head = jax.vmap(rope, in_axes=-2, out_axes=-2)
        return by_head(query), by_head(key)
    t, s = query.shape[1], key.shape[1]
    if t != s:
        rule = f"queries and keys share the positions, but there are {t} queries and {s} keys"
        remedy = "leave input_positions out, or rotate queries and keys before attention"
        raise InputError("input_positions", _shape(positions), rule, remedy)
    if jnp.shape(positions)[-1:] != (t,):
        rule, remedy = f"its last axis must have {t} entries", "give each token one position"
        raise InputError("input_positions", _shape(positions), rule, remedy)
    # Heads are axis -2 of a batch row [T, N, H], and each batch row has its positions.
    by_example = jax.vmap(jax.vmap(rope, in_axes=(-2, None), out_axes=-2))
    folded = fold(jnp.asarray(positions), batch, "input_positions", 1)
    each = jnp.broadcast_to(folded, (len(query), t))
    return by_example(query, each), by_example(key, each)


def fold(x: Array, batch: tuple[int, ...], name: str, axes: int = 3) -> Array:
    """Fold all but the last `axes` axes into one batch axis, of size B or 1."""
    full = x.reshape((1,) * (len(batch) + axes - x.ndim) + x.shape)
    lead, rest = full.shape[:-axes], full.shape[-axes:]
    if len(lead) != len(batch) or any(a not in (1, b) for a, b in zip(lead, batch, strict=True)):
        rule = f"its batch axes must broadcast to {batch}"
        remedy = "give every batch axis its full size or 1"
        raise InputError(name, _shape(x), rule, remedy)
    if all(a == 1 for a in lead):
        return full.reshape(1, *rest)
    return jnp.broadcast_to(full, (*batch, *rest)).reshape(-1, *rest)


def _shape(x: Any) -> str:
    return f"shape {tuple(jnp.shape(x))}"
