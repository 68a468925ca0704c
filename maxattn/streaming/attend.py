"""Attention of a stream's block to its cache: write keys and values, then attend.

Once every slot is filled, attention to the cache needs no mask: all its frames are visible.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from maxattn._attention import attention
from maxattn.context_parallel.base import CONTEXT
from maxattn.errors import Unsupported
from maxattn.masks import KeyPadding, Mask
from maxattn.rope import Rotary, apply_rotary
from maxattn.sharding import over_shards
from maxattn.streaming import checks
from maxattn.streaming.kv_cache import CacheLayer, KVCache

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from maxattn.config import AttentionConfig

    Own = tuple[Array, Array] | None


class Projected(NamedTuple):
    """Queries, keys and values of a block; rotated unless the cache keeps keys unrotated."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]


class How(NamedTuple):
    """The arguments of `attention` that a module sets."""

    scale: float | None
    config: AttentionConfig | None
    mesh: Any


def attend_with_cache(
    layer: CacheLayer,
    block: Projected,
    how: How,
    table: Rotary | None = None,
    mask: Any = None,
    bias: Any = None,
) -> tuple[Float[Array, "B T N H"], KVCache]:
    """Write a block's keys and values, attend to all visible keys; return (out, whole cache).

    `table` has the rotary angles of the window, [F, tokens, D], if keys are kept unrotated. A bias
    is allowed with `extract()`, a mask with `extract()` and `cached()`.
    """
    cache = layer.cache
    checks.same_dtype(cache, block.k, block.v)
    if cache.mode == "cached":
        return _read(layer, block.q, how, None, (block.k, block.v), mask), cache
    q, k, v = map(_undifferentiated, block) if cache.keeps else block
    attend = partial(attention, scale=how.scale, config=how.config, mesh=how.mesh)
    if cache.mode == "extract":
        out = attend(q, k, v, mask, bias)
        kept = slice(cache.start, cache.start + cache.tokens)
        return out, _write(layer, k[:, kept], v[:, kept], how.mesh)
    if cache.stage == "empty":
        turned = k if table is None else apply_rotary(k, turned_own(cache, table))
        # The first block sees itself; for blocks of a prefix, the stream's mask decides.
        stream = cache.layout.stream
        seen = None if cache.own == stream.first_block else stream.mask(cache.own)
        out = attend(q, turned, v, seen)
        return out, _write(layer, k, v, how.mesh) if cache.keeps else cache
    cache = _write(layer, k, v, how.mesh)
    return _read(CacheLayer(cache, layer.index), q, how, table), cache


@jax.custom_jvp
def _undifferentiated(x: Array) -> Array:
    return x


@_undifferentiated.defjvp
def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    rule = "a gradient through a write to the cache would keep a copy of the cache for every block"
    teacher = "run the blocks without gradients, then one forward with stream.teacher_mask"
    reading = "or pass a layer of cache.cached(), which is only read"
    raise Unsupported("cache", "under a gradient", rule, f"{teacher}; {reading}")


# ---- reading -------------------------------------------------------------------------------------


def _read(
    layer: CacheLayer, q: Array, how: How, table: Rotary | None, own: Own = None,
    mask: Mask | None = None,
) -> Float[Array, "B T N H"]:  # fmt: skip
    """Attend to a layer's kept keys, and to the call's own keys if they are not written.

    Args:
        table: rotary angles of the window, [F, tokens, D], if keys are kept unrotated.
        own: keys and values of the queries' tokens, if the cache is only read. Kept keys and values
            then get no gradient.
        mask: over the kept keys of a full cache, then the own keys; default all pairs.
    """
    cache = layer.cache
    layout, spread = cache.layout, q.shape[1] % cache.layout.token_ways == 0
    rows, old = layout.spec("B" if cache.frame.ndim else ""), layout.spec(".BFK.")
    fresh = jax.tree.map(lambda _: layout.spec("BFK."), own)
    turns = jax.tree.map(lambda _: layout.spec(".F."), table)
    in_specs = (old, old, rows, layout.spec(""), layout.spec("B.N."), fresh, turns)
    out_spec = layout.spec("BFN." if spread else "B.N.")

    def on_device(
        k: Array, v: Array, frame: Array, index: Array, q: Array, own: Own, table: Rotary | None
    ) -> Array:
        end, fits = frame if own is not None else frame + cache.own, _is_layer(index, k)
        # An array of one layer is taken whole, without a copy.
        k, v = (
            x[0] if len(x) == 1 else jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
            for x in (k, v)
        )
        if table is not None:
            k = apply_rotary(k, _at(table, layout.places(end)))
        filled, seen = jnp.minimum(end, layout.frames) * layout.tokens, mask
        if own is not None:
            new_k, new_v = _nan_unless(fits, own)
            # If slots are empty, own tokens come first, so that real keys precede empty slots.
            order = 1 if cache.stage == "full" else -1
            k, v = (jnp.concatenate(x[::order], 1) for x in ((k, new_k), (v, new_v)))
            filled = filled + new_k.shape[1]
        if cache.stage != "full":
            seen = KeyPadding(jnp.broadcast_to(filled, q.shape[:1]))
        attend = partial(attention, scale=how.scale, config=how.config, mesh=False)
        if layout.token_ways == 1:
            return attend(q, k, v, seen)
        return merged_over_devices(*attend(q, k, v, seen, return_lse=True), spread)

    attend = over_shards(on_device, how.mesh, layout.mesh, in_specs, out_spec)
    *kept, index = layer.arrays
    k, v = (x if own is None else jax.lax.stop_gradient(x) for x in kept)
    return attend(k, v, cache.frame, index, q, own, table)


def merged_over_devices(
    out: Float[Array, "B T N H"], lse: Float[Array, "B N T"], spread: bool
) -> Float[Array, "B T N H"]:
    """Merge, by LSE, results of devices for their own keys; if `spread`, shard the queries."""
    weight = jnp.exp(lse - jax.lax.pmax(jax.lax.stop_gradient(lse), CONTEXT))
    weight = weight / jax.lax.psum(weight, CONTEXT)
    part = out.astype(jnp.float32) * jnp.swapaxes(weight, 1, 2)[..., None]  # [B, T, N, 1]
    if spread:
        part = jax.lax.psum_scatter(part, CONTEXT, scatter_dimension=1, tiled=True)
    else:
        part = jax.lax.psum(part, CONTEXT)
    return part.astype(out.dtype)


def turned_own(cache: KVCache, table: Rotary) -> Rotary:
    """Return the angles of a block's own tokens; in a full window, its last angles."""
    start = jnp.minimum(cache.frame, cache.layout.frames - cache.own)
    own = jnp.arange(cache.own).reshape((1,) * start.ndim + (-1,))
    return _at(table, start[..., None] + own)


def _at(table: Rotary, places: Any) -> Rotary:
    """Return a table's angles at places [F] or [B, F]: [F * tokens, D] or [B, F * tokens, D]."""
    return jax.tree.map(
        lambda x: jnp.asarray(x)[places].reshape(*places.shape[:-1], -1, x.shape[-1]), table
    )


def _is_layer(index: Array, kept: Array) -> Array:
    """Return whether [L, B, S, K, H] has the layer, since a traced index cannot be refused."""
    return (index >= 0) & (index < len(kept))


def _nan_unless(fits: Array, new: Any) -> Any:
    """Return arrays, or NaN if they do not fit: jax would clamp the index to other frames."""
    return jax.tree.map(lambda x: jnp.where(fits, x, jnp.nan), new)


# ---- writing -------------------------------------------------------------------------------------


def _write(
    layer: CacheLayer, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], mesh: Any
) -> KVCache:
    cache = layer.cache
    layout, kept = cache.layout, {frame: frame for frame in range(cache.own)}
    is_first = cache.stage == "empty"
    if is_first:  # slots are known; if frames share a slot, the last one is kept
        kept = {layout.stream.slot_of(frame): frame for frame in kept}
    new = [x.reshape(x.shape[0], cache.own, -1, *x.shape[2:]) for x in (k, v)]
    rows, old = layout.spec("B" if cache.frame.ndim else ""), layout.spec(".BFK.")
    in_specs = (old, old, layout.spec("B.FK."), layout.spec("B.FK."), rows, layout.spec(""))

    def on_device(
        k: Array, v: Array, new_k: Array, new_v: Array, frame: Array, index: Array
    ) -> tuple[Array, Array]:
        fits = _is_layer(index, k)
        if layout.stream.window is None and not is_first:
            fits &= (frame + new_k.shape[1] <= layout.frames).reshape(-1, 1, 1, 1, 1)
        new_k, new_v = _nan_unless(fits, (new_k, new_v))
        for slot, i in kept.items():
            slot = slot if is_first else layout.stream.slot_of(frame + i)
            token = jnp.asarray(slot, jnp.int32) * layout.tokens
            k, v = (_put(x, new[:, i], index, token) for x, new in ((k, new_k), (v, new_v)))
        return k, v

    put = over_shards(on_device, mesh, layout.mesh, in_specs, (old, old))
    old_k, old_v, index = layer.arrays
    return layer.changed(*put(old_k, old_v, *new, cache.frame, index))


def _put(old: Array, new: Array, index: Array, token: Array) -> Array:
    """Write a frame [B, tokens, K, H] to a layer of [L, B, S, K, H]."""
    zero = jnp.zeros((), jnp.int32)  # with x64, a Python 0 would be int64, unlike the others
    if token.ndim == 0:
        return jax.lax.dynamic_update_slice(old, new[None], (index, zero, token, zero, zero))
    # One batch row at a time: a scatter of all batch rows would transpose and copy the cache.
    for row, part in enumerate(new):
        at = index, jnp.asarray(row, jnp.int32), token[row], zero, zero
        old = jax.lax.dynamic_update_slice(old, part[None, None], at)
    return old
