"""Write the keys and values of a block into its slots, one slab a frame."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from maxattn.sharding import over_shards

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from maxattn.streaming.kv_cache import CacheLayer, KVCache
    from maxattn.streaming.layout import CacheLayout


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


def write(
    layer: CacheLayer, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], mesh: Any
) -> KVCache:
    """Return the cache with a block's keys and values in its slots.

    Args:
        layer: where to.
        k, v: of the block that the cache is at.
        mesh: that the cache lies on.
    """
    cache = layer.cache
    layout, frames = cache.layout, cache.own
    new = [x.reshape(x.shape[0], frames, -1, *x.shape[2:]) for x in (k, v)]
    rows, old = layout.spec("B" if cache.frame.ndim else ""), layout.spec(".BFK.")
    in_specs = (old, old, layout.spec("B.FK."), layout.spec("B.FK."), rows, layout.spec(""))
    f = partial(_put_both, layout, tuple(slabs(cache)))
    put = over_shards(f, mesh, layout.mesh, in_specs, (old, old))
    old_k, old_v, index = layer.arrays
    return layer.changed(*put(old_k, old_v, *new, cache.frame, index))


def slabs(cache: KVCache) -> Iterator[Slab]:
    """List what is written: one slab a frame, or fewer where slots are known when tracing.

    A slab never goes past the last slot to the first one, as two frames of a block may.
    """
    if cache.stage != "empty":
        yield from (Slab(i, 1, None) for i in range(cache.own))
        return
    slots = cache.layout.stream.slots
    kept = {slots(frame): frame for frame in range(cache.own)}  # the last frame in each slot
    starts = [s for s in sorted(kept) if kept.get(s - 1) != kept[s] - 1]
    for start, stop in zip(starts, [*starts[1:], len(kept)], strict=True):
        yield Slab(kept[start], stop - start, start)


def _put_both(
    layout: CacheLayout,
    written: tuple[Slab, ...],
    k: Array,
    v: Array,
    new_k: Array,
    new_v: Array,
    frame: Int[Array, ""] | Int[Array, " B"],
    index: Int[Array, ""],
) -> tuple[Array, Array]:
    if layout.stream.window is None and any(slab.slot is None for slab in written):
        # A slice that leaves the array would be moved back into it, over other frames.
        fits = frame + new_k.shape[1] <= layout.frames
        fits = fits.reshape(-1, 1, 1, 1, 1)
        new_k, new_v = (jnp.where(fits, x, jnp.nan) for x in (new_k, new_v))
    for slab in written:
        of_frame = layout.stream.slots(frame + slab.first) if slab.slot is None else slab.slot
        token = jnp.asarray(of_frame, jnp.int32) * layout.tokens
        k, v = (_put(x, new, slab, index, token) for x, new in ((k, new_k), (v, new_v)))
    return k, v


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
