"""Refuse wrong inputs of a stream and its cache, by one function per rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxattn.config.numbers import LARGEST, whole
from maxattn.errors import InputError, MeshError
from maxattn.jax_private.mesh import is_tracer
from maxattn.masks import BIG, Mask
from maxattn.masks.base import text
from maxattn.masks.operands import DTYPES
from maxattn.sharding import MeshShape

if TYPE_CHECKING:
    from maxattn.streaming.kv_cache import KVCache
    from maxattn.streaming.stream import Stream

FRESH = "make a new cache with KVCache.empty"


def frames_from_zero(frame: Any) -> Any:
    """Check a frame number, or an array of frame numbers; traced ones may have any values."""
    if (number := whole(frame, least=0)) is not None:
        return number
    is_array = isinstance(frame, jax.Array | np.ndarray)
    is_integer = is_array and np.issubdtype(frame.dtype, np.integer)
    if is_integer and (is_tracer(frame) or (frame >= 0).all()):
        return frame
    rule = "frame numbers must be integers of at least 0"
    raise InputError("frame", repr(frame), rule, "give a number, or an array of integers")


def from_zero(name: str, value: Any, what: str) -> int:
    """Return an argument that is an integer of at least 0; `what` is its meaning."""
    if (number := whole(value, least=0)) is not None:
        return number
    raise InputError(name, repr(value), f"it must be {what}", "give 0 or a positive integer")


def clip_size(name: str, x: Any, axis: Any) -> int:
    """Return how many tokens or frames a clip has along an axis."""
    if not hasattr(x, "shape"):
        rule = "a clip must be an array of tokens, rotary angles or frame times"
        raise InputError(name, type(x).__name__, rule, "convert it with jnp.asarray")
    axes = len(x.shape)
    if whole(axis, -LARGEST) is None or not -axes <= axis < axes:
        rule = f"{name} has the axes 0 to {axes - 1}" if axes else f"{name} is a number"
        raise InputError("axis", repr(axis), rule, "give the axis of tokens or frames")
    return x.shape[axis]


def shards(number: Any, size: int, clip: str) -> None:
    if whole(number) is None or size % number:
        rule = f"shards must divide the {size} tokens or frames of {clip}"
        raise InputError("shards", repr(number), rule, "give the size of the context axis")


# ---- an empty cache ------------------------------------------------------------------------------


def sizes(**given: Any) -> tuple[int, ...]:
    """Return sizes as ints."""
    for name, value in given.items():
        if whole(value) is None:
            rule = "it must be an integer of at least 1"
            raise InputError(name, repr(value), rule, "set it to a positive integer")
    return tuple(map(int, given.values()))


def dtype(value: Any) -> str:
    """Return the name of a dtype; refuse dtypes that kernels cannot read."""
    try:
        name = jnp.dtype(value).name if value is not None else "None"
    except TypeError:
        name = repr(value)
    if name in DTYPES:
        return name
    rule = f"the dtype of keys and values must be one of {', '.join(DTYPES)}"
    raise InputError("dtype", name, rule, "give the dtype of the module's projections")


def slots(stream: Stream, frames: Any) -> int:
    """Return how many slots a cache has: the stream's window, or else `frames`."""
    if (count := stream.budget) is not None:
        if frames is not None:
            rule = f"the stream's window keeps {count} frames, whatever the length of the video"
            raise InputError("frames", frames, rule, "leave frames out")
    elif frames is None:
        rule = "a stream without a window keeps every frame"
        raise InputError("frames", "None", rule, "give the frames of the longest video")
    else:
        (count,) = sizes(frames=frames)
        if count < stream.first_block:
            rule = f"it must be at least {stream.first_block}, the frames of the first block"
            raise InputError("frames", count, rule, "give the frames of the longest video")
    if count * stream.tokens_per_frame > BIG:
        rule = f"the slots of a cache must have at most {BIG} tokens, the limit of positions"
        raise InputError("frames", count, rule, "give a smaller window, or fewer frames")
    return count


def per_layer(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    rule = "it must be True (separate arrays for each layer) or False"
    raise InputError("per_layer", repr(value), rule, "write True or False")


def layer(index: Any, layers: int, is_per_layer: bool) -> None:
    """Refuse a layer that the cache does not have, and a traced index into separate arrays."""
    is_array = isinstance(index, (np.generic, np.ndarray, jax.Array))
    is_integer = is_array and index.ndim == 0 and np.issubdtype(index.dtype, np.integer)
    if not is_integer and (not isinstance(index, int) or isinstance(index, bool)):
        rule = "a layer must be an integer, or an integer scalar under jit"
        raise InputError("layer", repr(index), rule, f"give 0 to {layers - 1}")
    if is_tracer(index) and is_per_layer:
        rule = "with per_layer=True, a traced number cannot choose the arrays of a layer"
        remedy = "loop over the layers in Python, or make the cache with per_layer=False"
        raise InputError("layer", "a traced number", rule, remedy)
    if not is_tracer(index) and not 0 <= int(index) < layers:
        remedy = f"give 0 to {layers - 1}, or a cache of more layers"
        raise InputError("layer", index, f"the cache has {layers} layers", remedy)


# ---- steps ---------------------------------------------------------------------------------------


def alive(cache: KVCache) -> None:
    """Refuse a cache whose arrays are deleted."""
    for x in jax.tree.leaves(cache):
        if isinstance(x, jax.Array) and not is_tracer(x) and x.is_deleted():
            rule = "this cache was donated to a program, so its arrays are deleted"
            raise InputError("cache", repr(cache), rule, "use the cache that the program returned")


def prefix(cache: KVCache, frames: Any) -> int:
    """Return the frames of a prefix; refuse partial blocks, and a cache that has frames."""
    alive(cache)
    if cache.stage != "empty" or cache.mode != "stream":
        rule = "a prefix is written to an empty cache, before extract()"
        raise InputError("prefix", frames, rule, "start with an empty cache, or go block by block")
    stream, count = cache.layout.stream, cache.layout.frames
    frames = stream.check_frames("prefix", frames)
    if frames > count and (stream.window is None or not cache.layout.is_roped):
        rule = f"the cache has {count} slots, and needs one for each frame of the prefix"
        raise InputError("prefix", frames, rule, f"give at most {count} frames")
    return frames


def unwritten(cache: KVCache) -> None:
    alive(cache)
    if cache.stage != "empty" or cache.mode != "stream":
        rule = "only the first block may be unwritten: later blocks, and extract(), must write"
        raise InputError("unwritten", repr(cache), rule, "leave out .unwritten()")


def advance(cache: KVCache) -> None:
    """Refuse to advance a cache that no pass has written to, or that has no empty slots."""
    alive(cache)
    if not cache.is_written:
        name = "cached" if cache.mode == "cached" else "unwritten"
        rule = f"a pass over cache.{name}() writes nothing, so there is nothing to advance"
        remedy = f"advance the cache that a pass without .{name}() returned"
        raise InputError("advance", repr(cache), rule, remedy)
    if cache.is_done:
        _refuse_more(cache)
    if cache.is_begun:
        rule = f"no pass has written to this cache, and {cache.own} frames would be skipped"
        remedy = "advance the cache that attention returned, once per block"
        raise InputError("advance", repr(cache), rule, remedy)


def _refuse_more(cache: KVCache) -> None:
    rule = f"without a window, {cache.layout.frames} slots have no room for another block"
    remedy = "give KVCache.empty more frames, or the Stream a window"
    raise InputError("cache", repr(cache), rule, remedy)


def stacked(given: Any) -> list[KVCache]:
    """Return caches as a list; refuse those that cannot be batch rows of one cache."""
    rule, remedy = "it must be a list of caches", "write KVCache.stacked([cache, other])"
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise InputError("caches", type(given).__name__, rule, remedy)
    caches: list[Any] = [*given]
    if not caches:
        raise InputError("caches", "[]", "stacked() needs at least one cache", "give one or more")
    for cache in caches:
        if not hasattr(cache, "layout"):
            raise InputError("caches", f"an item of {type(cache).__name__}", rule, remedy)
        alive(cache)
        if cache.stage == "empty" or cache.mode != "stream":
            rule = "caches can be stacked only after their first block"
            raise InputError("caches", repr(cache), rule, "make its first block, and advance it")
        if not is_tracer(cache.until) and bool((cache.until > 0).any()):
            rule = "caches can be stacked only when all kept frames are recomputed"
            raise InputError("caches", repr(cache), rule, "call refilled() on it first")
        rows = [(x.shape[0], *x.shape[2:], x.dtype, x.is_per_layer) for x in (cache, caches[0])]
        if cache.layout != caches[0].layout or rows[0] != rows[1]:
            rule = "all caches must be made with the same arguments, except for batch"
            raise InputError("caches", repr(cache), rule, "make all by the same KVCache.empty(...)")
    return caches


def extract(cache: KVCache, start: Any) -> int:
    """Return the first token that `extract` keeps; refuse a cache that is not empty."""
    alive(cache)
    if cache.stage != "empty" or not cache.keeps:
        rule = "extract() needs an empty cache that is not from unwritten()"
        raise InputError("extract", repr(cache), rule, "call extract() on a new KVCache.empty(...)")
    first = from_zero("start", start, "the index of a token")
    _refuse_slots(cache, "extract")
    return first


def cached(cache: KVCache) -> None:
    alive(cache)
    if cache.stage == "empty":
        rule = "the cache is empty until a pass has run and the cache is advanced"
        remedy = "call attention with the cache, and advance the cache that it returns"
        raise InputError("cached", repr(cache), rule, remedy)
    _refuse_slots(cache, "cached")


def _refuse_slots(cache: KVCache, what: str) -> None:
    if not cache.layout.is_roped:
        rule = f"{what}() needs rotated keys, and this cache keeps keys unrotated"
        remedy = "make the cache with positions='absolute'"
        raise InputError(what, cache.layout.positions, rule, remedy)


def append(cache: KVCache, other: KVCache) -> None:
    """Refuse to join caches that differ, that have a window, or that have empty slots."""
    for each in (cache, other):
        alive(each)
        if each.layout.stream.window is not None or each.mode != "stream":
            rule = "append() needs caches without a window that are not from extract() or cached()"
            remedy = "use no window, call advance() after extract(), and cached() after append()"
            raise InputError("append", repr(each), rule, remedy)
        frames = each.layout.frames
        known = not is_tracer(each.frame)  # otherwise the stage decides
        if bool((each.frame != frames).any()) if known else each.stage != "complete":
            rule = f"all of its {frames} slots must be filled before append()"
            raise InputError("append", repr(each), rule, "make it with as many frames= as it keeps")
    a, b = (
        (*x.shape[:2], *x.shape[3:], x.dtype, x.frame.shape, x.is_per_layer) for x in (cache, other)
    )
    if replace(other.layout, frames=cache.layout.frames) != cache.layout or a != b:
        rule = f"both caches must have one layout, batch and dtype, and the first is {cache!r}"
        raise InputError("append", repr(other), rule, "make both alike except for frames=")


def refill(cache: KVCache) -> None:
    alive(cache)
    if cache.mode != "stream" or cache.stage == "empty":
        rule = "refill() needs a cache that has frames and is not from extract() or cached()"
        raise InputError("refill", repr(cache), rule, "advance it after a block, and refill it")
    _one_frame(cache, "refill")
    if int(cache.until):
        rule = "refill() was called on this cache, and its frames are not all recomputed"
        raise InputError("refill", repr(cache), rule, "run the other kept frames, then refilled()")


def refilled(cache: KVCache, stream: Any, frame: Any) -> None:
    """Refuse a stream and a frame that are not those of the cache before `refill`."""
    alive(cache)
    _one_frame(cache, "refilled")
    until = int(cache.until)
    if not until:
        rule = "refilled() needs a cache that refill() returned, after passes over all kept frames"
        raise InputError("refilled", repr(cache), rule, "call refill() first")
    ours = cache.layout.stream
    fits = isinstance(stream, type(ours)) and stream.ends_block(until)
    if fits and until > cache.layout.frames:
        # refill() drops this field if the kept frames begin within a block.
        ours = replace(ours, first_frame_alone=stream.first_frame_alone)
    if stream != ours:
        made = {field.name: getattr(ours, field.name) for field in fields(ours)}
        other = [f"{name}={x}" for name, x in made.items() if getattr(stream, name, None) != x]
        rule = f"the cache was made for a stream with {', '.join(other)}"
        raise InputError("stream", repr(stream), rule, "give the stream that made the cache")
    if whole(frame) != until:
        rule = f"refill() began at frame {until}, and the video continues there"
        raise InputError("frame", repr(frame), rule, f"give frame={until}")
    count = len(stream.kept(frame))
    if int(cache.frame) != count:
        rule = f"all {count} frames that the stream keeps before frame {frame} must be recomputed"
        remedy = "after refill(), run every frame of stream.kept(frame), and advance the cache"
        raise InputError("refilled", repr(cache), rule, remedy)


def _one_frame(cache: KVCache, what: str) -> None:
    if is_tracer(cache.frame) or cache.frame.ndim:
        rule = f"{what} needs one frame number, known outside of jit, for all batch rows"
        remedy = f"call {what} outside of jit, on a cache that is not stacked"
        raise InputError(what, repr(cache), rule, remedy)


# ---- a call --------------------------------------------------------------------------------------


def beside(cache: KVCache, mask: Any, bias: Any) -> None:
    """Refuse masks and biases with a cache; for `cached()`, check that a mask covers all keys."""
    if cache.mode == "extract":
        return
    if bias is not None or (mask is not None and cache.mode != "cached"):
        name = "mask" if mask is not None and cache.mode != "cached" else "bias"
        rule = f"a block sees all keys of the cache, so no {name} applies"
        remedy = f"leave {name} out; the Stream's window and sink decide which keys stay"
        raise InputError(name, "given beside a cache", rule, remedy)
    if mask is None:
        return
    if cache.stage != "full":
        rule = "a mask needs a cache without empty slots"
        remedy = "make the cache with as many frames= as it keeps"
        raise InputError("mask", repr(cache), rule, remedy)
    if cache.layout.token_ways > 1:
        rule = "a mask needs all keys on each device, and context='tokens' splits them"
        remedy = "make the cache with context='heads'"
        raise InputError("mask", "given beside a cache", rule, remedy)
    if cache.layout.mesh and (not isinstance(mask, Mask) or mask.has_data):
        rule = "beside a cache on a mesh, a mask must be a function of positions, without arrays"
        raise InputError("mask", text(mask), rule, "use TeacherForcing, VideoMask or Rectangle")


def call(cache: KVCache, shape: Sequence[int], mesh: Any, axes: MeshShape) -> None:
    """Refuse a cache that does not fit the mesh or the keys [B, T, K, H] of a module."""
    alive(cache)
    _check_arrays(cache, shape, mesh, axes)
    if cache.is_done and cache.mode == "stream":
        _refuse_more(cache)
    tokens, frame = shape[1], cache.layout.stream.tokens_per_frame
    found, last = f"{tokens} tokens", cache.start + cache.tokens
    if cache.mode == "extract" and tokens < last:
        rule = f"extract(start={cache.start}) keeps tokens {cache.start} to {last - 1}"
        remedy = "pass the whole sequence, or give extract a smaller start"
        raise InputError("hidden_states", found, rule, remedy)
    if cache.mode == "cached" and tokens % cache.layout.token_ways:
        rule = f"tokens must divide over the {cache.layout.token_ways} devices of context"
        raise InputError("hidden_states", found, rule, "make the cache with context='heads'")
    if cache.mode == "stream" and tokens != cache.tokens:
        rule = f"a pass takes one whole block: {cache.own} x {frame} = {cache.tokens} tokens"
        remedy = "pass one block; for several first blocks, use cache.prefix(frames)"
        raise InputError("hidden_states", found, rule, remedy)


def _check_arrays(cache: KVCache, shape: Sequence[int], mesh: Any, axes: MeshShape) -> None:
    batch, _, heads, width = shape
    one_mesh = "pass the same mesh to KVCache.empty and the module"
    if cache.layout.mesh != axes:
        both = (", ".join(f"{axis}={n}" for axis, n in each) for each in (cache.layout.mesh, axes))
        found, ours = (each or "no mesh" for each in both)
        raise MeshError("cache.mesh", found, f"the module runs on {ours}", one_mesh)
    if (cache.shape[1], *cache.shape[3:]) != (batch, heads, width):
        rule = f"the module needs [L, B, S, K, H] with B={batch}, K={heads} key heads and H={width}"
        raise InputError("cache.k", f"shape {cache.shape}", rule, FRESH)
    if cache.frame.shape not in ((), (batch,)):
        rule = f"it must be one number, or one for each of the {batch} batch rows"
        raise InputError("cache.frame", f"shape {cache.frame.shape}", rule, FRESH)
    kept = jax.tree.leaves((cache.k, cache.v))
    slots, first = cache.layout.frames * cache.layout.stream.tokens_per_frame, kept[0]
    alike = all((x.shape, x.dtype) == (first.shape, first.dtype) for x in kept)
    if first.shape[2] != slots or not alike:
        shapes = ", ".join(dict.fromkeys(f"{x.dtype}{list(x.shape)}" for x in kept))
        rule = f"keys and values must have one shape and dtype, and the {slots} tokens of all slots"
        raise InputError("cache", shapes, rule, FRESH)
    if not isinstance(mesh, Mesh) or is_tracer(first) or not isinstance(first, jax.Array):
        return
    lies, runs = first.sharding.device_set, set(mesh.devices.flat)
    if lies != runs:
        found, ours = (f"devices {sorted(x.id for x in each)}" for each in (lies, runs))
        raise MeshError("cache.mesh", found, f"the module runs on {ours}", one_mesh)


def same_dtype(cache: KVCache, *keys: jax.Array) -> None:
    for x in keys:
        if x.dtype != cache.dtype:
            rule = f"it must be the dtype of the module's keys and values, {x.dtype}"
            remedy = f"give KVCache.empty dtype='{x.dtype}', or the module dtype={cache.dtype}"
            raise InputError("cache.k", cache.dtype.name, rule, remedy)
