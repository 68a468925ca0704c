"""Which keys a video model's queries attend to: all frames, blocks of a stream, or a cache.

A model calls `view_of` with what its caller passed:

    no argument          every token attends to every other
    cache=               a block attends to itself and to the cache
    forcing=             diffusion forcing: frames with times of their own, under `stream.mask`
    forcing= with clean  teacher forcing: a clean clip and the same clip noisy, in one sequence
    cache= and forcing=  a noisy clip under the mask of teacher forcing, its clean one in the cache
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import InputError
from maxattn.masks import Mask
from maxattn.sharding import mesh_shape, ways


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forcing:
    """Frames with times of their own, masked by a stream.

    Args:
        clean: for teacher forcing, the clip without noise or with the context's little noise;
            default None, for diffusion forcing.
        t_clean: times of `clean` [B, F]; default 0.
    """

    stream: ma.Stream = field(metadata={"static": True})
    clean: Float[Array, "B F H W C"] | None = None
    t_clean: Float[Array, "B F"] | None = None


class View(NamedTuple):
    """The keys that the tokens of a call attend to.

    Args:
        rotary: for the tokens; for a cache that stores keys by slots, for its whole window.
        mask: None for full attention.
        cache: the cache to read or write, or None.
        paired: the stream whose mask orders a clean clip before the noisy one, or None.
        shards: number of devices that both clips are split over.
    """

    rotary: ma.Rotary
    mask: Mask | None = None
    cache: ma.KVCache | None = None
    paired: ma.Stream | None = None
    shards: int = 1

    def pair(self, clean: Any, noisy: Any) -> Any:
        """Concatenate tokens or times of both clips along axis 1, in the order of the mask."""
        return noisy if self.paired is None else self.paired.pair(clean, noisy, self.shards)

    def noisy(self, both: Any) -> Any:
        """Return the tokens or times of the noisy clip."""
        return both if self.paired is None else self.paired.unpair(both, self.shards)[1]

    @property
    def writes(self) -> bool:
        """Whether layers change the cache, so that a scan must carry it."""
        return self.cache is not None and self.cache.is_written


def view_of(
    frames: int,
    rope: Callable[[Any], ma.Rotary],
    cache: ma.KVCache | None,
    forcing: Forcing | None,
    mesh: Any = None,
    positions: Any = None,
) -> View:
    """Return the keys that the tokens of a call attend to.

    Args:
        rope: makes a rotary table from a number of frames, or from frame numbers.
        positions: frame numbers, [F] or [B, F]; default from `cache.frame`, or from 0.
    """
    if forcing is None:
        return _by_cache(frames, rope, cache, positions)
    stream = forcing.stream
    table = rope(frames if positions is None else positions)
    if cache is not None:
        mask = stream.mask(frames) if cache.mode == "extract" else stream.teacher_mask(frames)
        return View(table, mask, cache)
    if forcing.clean is None:
        return View(table, stream.mask(frames))
    shards = _shards(stream, frames, mesh)
    axis = table.cos.ndim - 2
    both = (jnp.asarray(x) for x in (table.cos, table.sin))
    cos, sin = (stream.pair(x, x, shards, axis) for x in both)
    mask = stream.teacher_mask(frames, shards)
    return View(ma.Rotary(cos, sin, table.style), mask, None, stream, shards)


def _shards(stream: ma.Stream, frames: int, mesh: Any) -> int:
    """Return over how many devices to interleave both clips; 1 if blocks do not divide evenly.

    With 1 the clips are concatenated: the results are equal, and the devices' work is less even.
    """
    count = ways("T", mesh_shape(mesh))
    whole = frames % (count * stream.frames_per_block) == 0 and not stream.first_frame_alone
    return count if whole else 1


def _by_cache(
    frames: int, rope: Callable[[Any], ma.Rotary], cache: ma.KVCache | None, positions: Any
) -> View:
    if cache is not None and not cache.layout.is_roped:
        return View(rope(cache.layout.frames), cache=cache)
    if positions is None and cache is not None:
        positions = cache.frame[..., None] + jnp.arange(frames)
    return View(rope(frames if positions is None else positions), cache=cache)


# ---- refusals ------------------------------------------------------------------------------------


def check_call(
    latents: Any,
    t: Any,
    grid: tuple[int, int, int],
    cache: ma.KVCache | None,
    forcing: Forcing | None,
    layers: int,
) -> None:
    """Refuse times, clips and caches that do not fit together.

    Args:
        grid: frames, rows and columns of tokens.

    Raises:
        InputError: it names the argument that does not fit.
    """
    if cache is None and forcing is None:
        return
    _check_type("cache", cache, ma.KVCache, "all layers of a KVCache are the model's")
    _check_type("forcing", forcing, Forcing, "it has a stream and a clean clip")
    stream = cache.layout.stream if forcing is None and cache is not None else None
    _check_tokens(forcing.stream if forcing is not None else stream, grid)
    _check_times(t, grid[0], "cache" if forcing is None else "forcing")
    if cache is not None:
        if (found := cache.shape[0]) != layers:  # a scan would share keys between the last layers
            rule = f"each of the model's {layers} layers has keys and values of its own"
            remedy = f"make the cache with layers={layers}"
            raise InputError("cache", f"{found} layers", rule, remedy)
        _check_cache(cache, forcing, grid[0])
    if forcing is not None:
        _check_clean(forcing, latents, grid[0])


def _check_type(name: str, value: Any, kind: type, rule: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise InputError(name, type(value).__name__, rule, f"pass a {kind.__name__}")


def _check_tokens(stream: Any, grid: tuple[int, int, int]) -> None:
    _, rows, columns = grid
    if (given := stream.tokens_per_frame) != rows * columns:
        rule = f"a frame of these latents has {rows} x {columns} = {rows * columns} tokens"
        remedy = f"make the Stream with tokens_per_frame={rows * columns}"
        raise InputError("tokens_per_frame", given, rule, remedy)


def _check_times(t: Any, frames: int, beside: str) -> None:
    if t.ndim != 2 or t.shape[1] != frames:
        rule = f"with {beside}= each of the {frames} frames needs a time, 0 if it is clean"
        remedy = f"pass [B, {frames}]: jnp.broadcast_to(t[:, None], (B, {frames}))"
        raise InputError("t", f"shape {tuple(t.shape)}", rule, remedy)


def _check_cache(cache: ma.KVCache, forcing: Forcing | None, frames: int) -> None:
    if forcing is not None and cache.mode == "stream":
        rule = "a block attends to the whole cache, so it needs no mask"
        remedy = "leave forcing out; cache.cached() and cache.extract() take a mask"
        raise InputError("forcing", "given beside a cache that streams", rule, remedy)
    if forcing is not None and forcing.clean is not None:
        rule = "the clean clip is in the cache, or is the latents of this call"
        raise InputError("forcing.clean", "given beside a cache", rule, "leave clean out")
    if cache.mode == "stream" and frames != cache.own:
        rule = f"the next block has {cache.own} frames"
        remedy = "pass one block; cache.prefix(frames) takes several at first"
        raise InputError("latents", f"{frames} frames", rule, remedy)


def _check_clean(forcing: Forcing, latents: Any, frames: int) -> None:
    clean, times = forcing.clean, forcing.t_clean
    if clean is None and times is not None:
        rule = "it is the time of forcing.clean, which is not given"
        raise InputError("forcing.t_clean", "given", rule, "give forcing.clean, or leave it out")
    if clean is not None and clean.shape != latents.shape:
        rule = f"it must have the latents' shape, {tuple(latents.shape)}"
        raise InputError("forcing.clean", f"shape {tuple(clean.shape)}", rule, "pass that one")
    if times is not None and tuple(times.shape) != (latents.shape[0], frames):
        rule = f"each of the {frames} frames has a time: [{latents.shape[0]}, {frames}]"
        value = f"shape {tuple(times.shape)}"
        raise InputError("forcing.t_clean", value, rule, "leave it out for clips without noise")
