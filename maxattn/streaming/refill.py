"""Cache the frames of a window anew, in their own slots, as a change of prompt asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from maxattn.errors import InputError
from maxattn.jax_private.mesh import is_tracer

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from maxattn.streaming.kv_cache import KVCache
    from maxattn.streaming.stream import Stream

Cache = TypeVar("Cache", bound="KVCache")


def begin_refill(cache: Cache) -> Cache:
    """Return the cache as if it were empty; `KVCache.refill` says more."""
    _check_begin(cache)
    layout = cache.layout
    if int(cache.frame) > layout.frames:
        # What is kept begins within a block, so the grid is counted from its end.
        layout = replace(layout, stream=replace(layout.stream, first_frame_alone=False))
    frame, own = jnp.zeros_like(cache.frame), layout.stream.first_block
    return replace(cache, frame=frame, layout=layout, own=own, stage="empty")


def end_refill(cache: Cache, stream: Stream, frame: int) -> Cache:
    """Return the cache at the frame that it was at; `KVCache.refilled` says more."""
    _check_end(cache, stream, frame)
    layout = replace(cache.layout, stream=stream)
    behind = frame - len(stream.kept(frame))
    whole = replace(cache, layout=layout, frame=jnp.full_like(cache.frame, frame))
    if not behind:
        return whole
    k, v = jax.tree.map(lambda x: _turned(whole, x, behind), (cache.k, cache.v))
    return replace(whole, k=k, v=v)


def _turned(cache: KVCache, x: Float[Array, "L B S K H"], behind: int) -> Float[Array, "L B S K H"]:
    """Move the frames behind the sink to the slots that they have `behind` frames later."""
    layout, (layers, batch, _, *heads) = cache.layout, x.shape
    # Each device has all slots, with its share of the tokens of a frame.
    cut = (layers, batch, layout.token_ways, layout.frames, -1, *heads)
    slots, sink = x.reshape(cut), layout.sink
    ring = jnp.roll(slots[:, :, :, sink:], behind, axis=3)
    return slots.at[:, :, :, sink:].set(ring).reshape(x.shape)


def _check_begin(cache: KVCache) -> None:
    if cache.mode != "stream" or cache.stage == "empty":
        rule = "the frames that a stream keeps are cached anew, and there are none"
        raise InputError("refill", repr(cache), rule, "make the first block, and advance it")
    _check_frame(cache, "refill")


def _check_frame(cache: KVCache, what: str) -> None:
    if is_tracer(cache.frame) or cache.frame.ndim:
        rule = "which frames are kept is read from the one frame that the cache is at"
        remedy = "call it outside of jit, on a cache whose rows are at the same frame"
        raise InputError(what, repr(cache), rule, remedy)


def _check_end(cache: KVCache, stream: Stream, frame: Any) -> None:
    _check_frame(cache, "refilled")
    count = len(stream.kept(frame))
    if int(cache.frame) != count:
        rule = f"{count} of the frames before frame {frame} are kept, and all are cached anew"
        remedy = "run each of stream.kept(frame) after refill(), and advance"
        raise InputError("refilled", repr(cache), rule, remedy)
