"""Attend over what a cache keeps: dense, once every slot is filled, since it holds what is seen."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from maxattn.attention import attention
from maxattn.masks import KeyPadding, Mask
from maxattn.rope import Rotary, apply_rotary
from maxattn.sharding import over_shards

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from maxattn.config import AttentionConfig
    from maxattn.streaming.kv_cache import CacheLayer, KVCache
    from maxattn.streaming.layout import CacheLayout

    Own = tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]] | None

CONTEXT = "context"


class How(NamedTuple):
    """Hold what a module attends with.

    Args:
        scale, config, mesh: as for `attention`.
    """

    scale: float | None
    config: AttentionConfig | None
    mesh: Any


def read(
    layer: CacheLayer,
    q: Float[Array, "B T N H"],
    how: How,
    table: Rotary | None,
    own: Own = None,
    mask: Mask | None = None,
) -> Float[Array, "B T N H"]:
    """Attend to the keys of a layer, and to own ones that are not written.

    Args:
        layer: what is kept.
        q: queries.
        how: scale, config and mesh.
        table: of the window, [F, tokens, D], for keys that are kept without rotary embedding.
        own: keys and values of the queries' tokens, where the cache is read alone. What is kept is
            a constant to their gradient.
        mask: over the kept keys of a full cache and then the own ones; default everything.
    """
    cache = layer.cache
    layout, spread = cache.layout, q.shape[1] % cache.layout.token_ways == 0
    rows, old = layout.spec("B" if cache.frame.ndim else ""), layout.spec(".BFK.")
    fresh = jax.tree.map(lambda _: layout.spec("BFK."), own)
    turns = jax.tree.map(lambda _: layout.spec(".F."), table)
    in_specs = (old, old, rows, layout.spec(""), layout.spec("B.N."), fresh, turns)
    out_spec = layout.spec("BFN." if spread else "B.N.")
    f = partial(_read_on_device, _Reading(layout, cache.own, cache.stage, how, spread, mask))
    attend = over_shards(f, how.mesh, layout.mesh, in_specs, out_spec)
    *kept, index = layer.arrays
    k, v = (x if own is None else jax.lax.stop_gradient(x) for x in kept)
    return attend(k, v, cache.frame, index, q, own, table)


class _Reading(NamedTuple):
    """Hold what is known before tracing.

    Args:
        layout, frames, stage: of the cache; the frames of the block that is being made.
        how: as for `read`.
        spread: whether the output's tokens divide over the devices that share the tokens.
        mask: as for `read`.
    """

    layout: CacheLayout
    frames: int
    stage: str
    how: How
    spread: bool
    mask: Mask | None


def _read_on_device(
    reading: _Reading,
    k: Float[Array, "L B S K H"],
    v: Float[Array, "L B S K H"],
    frame: Int[Array, ""] | Int[Array, " B"],
    index: Int[Array, ""],
    q: Float[Array, "B T N H"],
    own: Own,
    table: Rotary | None,
) -> Float[Array, "B T N H"]:
    layout, how = reading.layout, reading.how
    end = frame if own is not None else frame + reading.frames
    k, v = (_of_layer(x, index) for x in (k, v))
    k = k if table is None else apply_rotary(k, turned_by_place(layout, table, end))
    filled, mask = layout.frames_after(end) * layout.tokens, reading.mask
    if own is not None:
        # Where slots are empty own tokens come first, so that the keys that are there do.
        parts = (
            ((k, own[0]), (v, own[1])) if reading.stage == "full" else ((own[0], k), (own[1], v))
        )
        k, v = (jnp.concatenate(pair, axis=1) for pair in parts)
        filled = filled + own[0].shape[1]
    if reading.stage != "full":
        mask = KeyPadding(jnp.broadcast_to(filled, q.shape[:1]))
    given: dict[str, Any] = {"scale": how.scale, "config": how.config, "mesh": False}
    if layout.token_ways == 1:
        return attention(q, k, v, mask, **given)
    out, lse = attention(q, k, v, mask, **given, return_lse=True)
    return _merged(out, lse, reading.spread)


def _of_layer(x: Float[Array, "L B S K H"], index: Int[Array, ""]) -> Float[Array, "B S K H"]:
    """Take a layer: of arrays of one layer all, which is no copy."""
    return x[0] if len(x) == 1 else jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _merged(
    out: Float[Array, "B T N H"], lse: Float[Array, "B N T"], spread: bool
) -> Float[Array, "B T N H"]:
    """Merge what the devices found over their keys; of the result each may keep some queries."""
    weight = jnp.exp(lse - jax.lax.pmax(jax.lax.stop_gradient(lse), CONTEXT))
    weight = weight / jax.lax.psum(weight, CONTEXT)
    part = out.astype(jnp.float32) * jnp.swapaxes(weight, 1, 2)[..., None]  # [B, T, N, 1]
    if spread:
        part = jax.lax.psum_scatter(part, CONTEXT, scatter_dimension=1, tiled=True)
    else:
        part = jax.lax.psum(part, CONTEXT)
    return part.astype(out.dtype)


# ---- rotary embedding by place in the window -----------------------------------------------------


def turned_by_place(layout: CacheLayout, table: Rotary, end: Any) -> Rotary:
    """Give the angles of every slot's tokens: those of its frame's place in the window.

    Args:
        layout: of the cache.
        table: [F, tokens, D], by place.
        end: the frame after the last one written; a number, or one a batch row.
    """
    return _at(table, layout.places(end))


def turned_own(cache: KVCache, table: Rotary) -> Rotary:
    """Give the angles of the block's own tokens: the last ones of the window, once it is full.

    Args:
        cache: that is at the block.
        table: [F, tokens, D], by place.
    """
    start = jnp.minimum(cache.frame, cache.layout.frames - cache.own)
    return _at(table, start[..., None] + jnp.arange(cache.own))


def _at(table: Rotary, places: Any) -> Rotary:
    """Take places of a table, [F] or [B, F]: [F * tokens, D], or [B, F * tokens, D]."""
    return jax.tree.map(
        lambda x: jnp.asarray(x)[places].reshape(*places.shape[:-1], -1, x.shape[-1]), table
    )
