"""One block of a streamed video: the program of `Rollout`, compiled from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from maxattn_examples.common.compiled import Structure, sampling_options, split
from maxattn_examples.stream import Denoising, Reel, Rollout

import maxattn as ma
from maxattn.errors import ConfigError

from .steps import Step, drawing
from .workloads import FRAMES, Workload


@dataclass(frozen=True)
class Blocks:
    """The measured blocks of a streamed video.

    Args:
        work: the model; its latents are the whole video, which a stream without a window keeps.
        stream: blocks, window and sink.
        how: the passes of a block.
        first: measure the first block of a video, instead of one that finds a full cache.
    """

    work: Workload
    stream: ma.Stream
    how: Denoising
    first: bool = False

    @classmethod
    def of(
        cls, work: Workload, window: int | None, sink: int, size: int, how: Denoising, first: bool
    ) -> Blocks:
        """Make blocks whose window (None for all frames), sink and size are in latent frames.

        Raises:
            ConfigError: the window is not a multiple of the block.
            InputError: window and sink do not fit, or the video is not a multiple of the block.
        """
        batch, frames = work.shapes["latents"][:2]
        tokens = work.tokens // (batch * frames)
        stream = ma.Stream(tokens, size)
        if window is not None and window % size:
            rule = f"it must be a multiple of the block of {size} latent frames"
            near = window - window % size or size
            raise ConfigError("--window", window, rule, f"write {near}, {near + size} or all")
        stream = replace(stream, window=None if window is None else window // size, sink=sink)
        slots = stream.budget or stream.check_frames("--frames", frames)
        seen = f"blocks of {size} latent frames, cache of {slots}, {sink} of them kept"
        which = "first block" if first else "full cache"
        name = f"{work.name.rpartition(', batch')[0]}, {seen}, {which}, batch {batch}"
        return cls(replace(work, name=name, tokens=batch * size * tokens), stream, how, first)

    # ---- sizes -----------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Number of videos that are made together."""
        return self.work.shapes["latents"][0]

    @property
    def slots(self) -> int:
        """Number of latent frames in the cache."""
        return self.stream.budget or self.work.shapes["latents"][1]

    @property
    def frame(self) -> int:
        """The first latent frame of the block; without a window, of the video's last block."""
        if self.first:
            return 0
        return self.slots - (self.stream.frames_per_block if self.stream.window is None else 0)

    @property
    def video_frames(self) -> int:
        """Frames of video in a block; the first latent frame of a video is one frame."""
        return FRAMES * self.stream.frames_per_block - (FRAMES - 1) * self.first

    # ---- the program -----------------------------------------------------------------------------

    def compiled(self, dtype: Any, options: Iterable[str] = ()) -> Step:
        """Compile the program that makes a block, with computation and parameters in `dtype`."""
        chosen = sampling_options(options)
        model, text, empty, given = self._shapes(dtype)
        structure, params = split(model)
        run = self._rollout(model, chosen)

        def step(cache: ma.KVCache, given: Any) -> ma.KVCache:
            return self._again(run.block(self._reel(given, cache))[1].cache)

        def forward(cache: ma.KVCache, fixed: tuple[Any, Any]) -> Any:
            params, given = fixed
            return self._rollout(structure.merge(params)).block(self._reel(given, cache))[0]

        cache = self._at(empty)
        program = run.lower(self._reel(given, cache)).compile()
        draw = drawing((nnx.state(model), text, (empty.k, empty.v)))
        encode = jax.jit(partial(self._once, structure)).lower(params, text).compile()

        def start() -> tuple[Any, Any]:
            state, text, (k, v) = draw()
            leaves = tuple(jax.tree.leaves(state))
            run.update(structure.merge(leaves))
            others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), replace(cache, k=(), v=()))
            return self._at(replace(others, k=k, v=v), self.frame), encode(leaves, text)

        shapes = cache, (params, given)
        return Step(self.work, step, start, forward, shapes, program, self._facts)

    def lowered(self, dtype: Any, put: Callable[[Any], Any]) -> Any:
        """Lower the program for another machine; `put` gives shapes that machine's sharding."""
        model, _, empty, given = self._shapes(dtype)
        structure, params = split(model)
        run = self._rollout(structure.merge(put(params)))
        return run.lower(self._reel(put(given), put(self._at(empty))))

    def _shapes(self, dtype: Any) -> tuple[Any, Any, ma.KVCache, Any]:
        """Return the model, its text, an empty cache, and the keys and values of the text."""
        model: Any = nnx.eval_shape(lambda: self.work.make(dtype, dtype))
        structure, params = split(model)
        text = jax.ShapeDtypeStruct(self.work.shapes["text"], dtype)
        frames = None if self.stream.window else self.slots
        empty = jax.eval_shape(lambda: model.cache(self.stream, self.batch, frames))
        return model, text, empty, jax.eval_shape(partial(self._once, structure), params, text)

    def _once(self, structure: Structure, params: Any, text: Any) -> Any:
        return self.work.once(structure.merge(params), {"text": text})["kv"]

    def _rollout(self, model: Any, options: Mapping[str, Any] | None = None) -> Rollout:
        _, _, rows, columns, channels = self.work.shapes["latents"]
        return Rollout(model, self.stream, (rows, columns, channels), self.how, options=options)

    def _reel(self, given: Any, cache: ma.KVCache) -> Reel:
        return Reel(given, self.batch, self.frame, cache)

    def _at(self, cache: ma.KVCache, frame: int | None = None) -> ma.KVCache:
        """Return the cache as it is before the measured block."""
        number = cache.frame if frame is None else jnp.asarray(frame, jnp.int32)
        stage: Any = "empty" if self.first else "full"
        return replace(cache, frame=number, stage=stage, own=self.stream.frames_per_block)

    def _again(self, cache: ma.KVCache | None) -> ma.KVCache:
        """Keep the cache for the next block, or reset it if the next block is another program."""
        assert cache is not None, "the rollout keeps a cache"
        rolls = self.stream.window is not None and not self.first
        return cache if rolls else self._at(cache, self.frame)

    # ---- figures ---------------------------------------------------------------------------------

    def _facts(self, step: Step, ms: float) -> dict[str, Any]:
        stream = self.stream
        return {
            "frames_per_block": stream.frames_per_block,
            "window": stream.budget,
            "sink": stream.sink,
            "first_block": self.first,
            "denoising_steps": len(self.how.denoising_steps),
            "clean_pass": self.how.clean_pass,
            "cache_frames": self.slots,
            "cache_bytes": step.shapes[0].nbytes,
            "video_frames": self.video_frames,
            "video_frames_per_s": 1e3 * self.batch * self.video_frames / ms,
        }


def passes(steps: int, clean_pass: bool = True) -> Denoising:
    """Return `steps` passes of denoising, whose times are evenly spaced before their shift."""
    times = tuple(1000 * (steps - i) / steps for i in range(steps))
    return Denoising(times, clean_pass=clean_pass)
