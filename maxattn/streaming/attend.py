"""A block's attention with a cache: what it writes, and what its queries see.

Once every slot is filled attention over the cache is dense, since the cache holds what is seen.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from maxattn.attention import attention
from maxattn.errors import Unsupported
from maxattn.masks import KeyPadding, Mask
from maxattn.rope import Rotary, apply_rotary
from maxattn.sharding import over_shards
from maxattn.streaming import checks
from maxattn.streaming.kv_cache import CacheLayer, KVCache

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from maxattn.config import AttentionConfig

    Own = tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]] | None

CONTEXT = "context"


class Projected(NamedTuple):
    """Hold the queries, keys and values of a block, normed and, where keys are kept so, turned.

    Args:
        q: [B, T, N, H].
        k, v: [B, T, K, H].
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]


class How(NamedTuple):
    """Hold what a module attends with.

    Args:
        scale, config, mesh: as for `attention`.
    """

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
    """Write a block's keys and values, and attend to all that the block sees.

    Args:
        layer: of the cache.
        block: queries, keys and values.
        how: scale, config and mesh.
        table: of the window, [F, tokens, D], where keys are kept without rotary embedding.
        mask, bias: of a pass that extracts; a mask of one that reads alone too.

    Returns:
        The output and the whole cache.

    Raises:
        InputError: the cache is of another dtype.
        Unsupported: a pass that writes is differentiated.
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
        # The first block sees itself; blocks of a prefix see what the stream says.
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
    rule = "a gradient through what is written would keep a copy of the cache for every block"
    teacher = "run the blocks without gradient, then one forward with stream.teacher_mask over them"
    reading = "cache.cached() is read under a gradient"
    raise Unsupported("cache", "under a gradient", rule, f"{teacher}; {reading}")


# ---- reading -------------------------------------------------------------------------------------


def _read(
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

    def on_device(
        k: Float[Array, "L B S K H"],
        v: Float[Array, "L B S K H"],
        frame: Int[Array, ""] | Int[Array, " B"],
        index: Int[Array, ""],
        q: Float[Array, "B T N H"],
        own: Own,
        table: Rotary | None,
    ) -> Float[Array, "B T N H"]:
        end = frame if own is not None else frame + cache.own
        # Of arrays of one layer it is all, which is no copy.
        k, v = (
            x[0] if len(x) == 1 else jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
            for x in (k, v)
        )
        if table is not None:
            k = apply_rotary(k, _at(table, layout.places(end)))
        filled, seen = jnp.minimum(end, layout.frames) * layout.tokens, mask
        if own is not None:
            # Where slots are empty own tokens come first, so that the keys that are there do.
            order = 1 if cache.stage == "full" else -1
            k, v = (jnp.concatenate(x[::order], 1) for x in ((k, own[0]), (v, own[1])))
            filled = filled + own[0].shape[1]
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
    """Merge what the devices found over their keys; of the result each may keep some queries."""
    weight = jnp.exp(lse - jax.lax.pmax(jax.lax.stop_gradient(lse), CONTEXT))
    weight = weight / jax.lax.psum(weight, CONTEXT)
    part = out.astype(jnp.float32) * jnp.swapaxes(weight, 1, 2)[..., None]  # [B, T, N, 1]
    if spread:
        part = jax.lax.psum_scatter(part, CONTEXT, scatter_dimension=1, tiled=True)
    else:
        part = jax.lax.psum(part, CONTEXT)
    return part.astype(out.dtype)


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


# ---- writing -------------------------------------------------------------------------------------


class Slab(NamedTuple):
    """Name frames of a block that lie in slots that follow one another.

    Args:
        first: the first of them in the block.
        count: how many.
        slot: the first slot; None where the frame's number is known on the device alone.
    """

    first: int
    count: int
    slot: int | None


def _write(
    layer: CacheLayer, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], mesh: Any
) -> KVCache:
    """Return the cache with a block's keys and values in its slots."""
    cache = layer.cache
    layout, written = cache.layout, _slabs(cache)
    new = [x.reshape(x.shape[0], cache.own, -1, *x.shape[2:]) for x in (k, v)]
    rows, old = layout.spec("B" if cache.frame.ndim else ""), layout.spec(".BFK.")
    in_specs = (old, old, layout.spec("B.FK."), layout.spec("B.FK."), rows, layout.spec(""))

    def on_device(
        k: Array, v: Array, new_k: Array, new_v: Array, frame: Array, index: Array
    ) -> tuple[Array, Array]:
        if layout.stream.window is None and cache.stage != "empty":
            # A slice that leaves the array would be moved back into it, over other frames.
            fits = (frame + new_k.shape[1] <= layout.frames).reshape(-1, 1, 1, 1, 1)
            new_k, new_v = (jnp.where(fits, x, jnp.nan) for x in (new_k, new_v))
        for slab in written:
            slot = layout.stream.slots(frame + slab.first) if slab.slot is None else slab.slot
            token = jnp.asarray(slot, jnp.int32) * layout.tokens
            k, v = (_put(x, new, slab, index, token) for x, new in ((k, new_k), (v, new_v)))
        return k, v

    put = over_shards(on_device, mesh, layout.mesh, in_specs, (old, old))
    old_k, old_v, index = layer.arrays
    return layer.changed(*put(old_k, old_v, *new, cache.frame, index))


def _slabs(cache: KVCache) -> list[Slab]:
    """List what is written: one slab a frame, or fewer where slots are known when tracing.

    A slab never goes past the last slot to the first one, as two frames of a block may.
    """
    if cache.stage != "empty":
        return [Slab(i, 1, None) for i in range(cache.own)]
    slots = cache.layout.stream.slots
    kept = {slots(frame): frame for frame in range(cache.own)}  # the last frame in each slot
    starts = [s for s in sorted(kept) if kept.get(s - 1) != kept[s] - 1]
    both = zip(starts, [*starts[1:], len(kept)], strict=True)
    return [Slab(kept[start], stop - start, start) for start, stop in both]


def _put(
    old: Float[Array, "L B S K H"],
    new: Float[Array, "B F tokens K H"],
    slab: Slab,
    index: Int[Array, ""],
    token: Int[Array, ""] | Int[Array, " B"],
) -> Float[Array, "L B S K H"]:
    batch, _, _, *heads = new.shape
    part = new[:, slab.first : slab.first + slab.count].reshape(1, batch, -1, *heads)
    if token.ndim == 0:
        return jax.lax.dynamic_update_slice(old, part, (index, 0, token, 0, 0))
    # Row by row: a scatter of all rows at once turns the cache's axes, and copies all of it.
    for row in range(batch):
        at = (index, row, token[row], 0, 0)
        old = jax.lax.dynamic_update_slice(old, part[:, row : row + 1], at)
    return old
