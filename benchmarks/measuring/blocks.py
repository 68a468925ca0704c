"""A block of streamed video, compiled from shapes alone: what `rollout.Rollout` runs for a user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from maxattn_examples.common.split import Structure, split
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
        first: the first block of a video, instead of one that finds the cache full.
    """

    work: Workload
    stream: ma.Stream
    how: Denoising
    first: bool = False

    @classmethod
    def of(
        cls, work: Workload, window: int | None, sink: int, size: int, how: Denoising, first: bool
    ) -> Blocks:
        """Describe blocks in latent frames.

        Args:
            work: Wan, of the whole video.
            window: frames that a block sees, its own included; None for all.
            sink: first frames that stay visible, of these.
            size: frames of a block.
            how: the passes.
            first: as above.

        Raises:
            ConfigError: the window is no whole blocks.
            InputError: window and sink do not fit, or the video is no whole blocks.
        """
        batch, frames = work.shapes["latents"][:2]
        tokens = work.tokens // (batch * frames)
        stream = ma.Stream(tokens, size)
        if window is not None and window % size:
            rule = f"it is whole blocks of {size} latent frames"
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
        """Videos that are made side by side."""
        return self.work.shapes["latents"][0]

    @property
    def slots(self) -> int:
        """Latent frames that the cache has room for."""
        return self.stream.budget or self.work.shapes["latents"][1]

    @property
    def frame(self) -> int:
        """The first latent frame of the block: without a window, of the video's last one."""
        if self.first:
            return 0
        return self.slots - (self.stream.frames_per_block if self.stream.window is None else 0)

    @property
    def video_frames(self) -> int:
        """Frames of video of a block; the first latent frame of a video is one frame."""
        return FRAMES * self.stream.frames_per_block - (FRAMES - 1) * self.first

    # ---- the program -----------------------------------------------------------------------------

    def compiled(self, dtype: Any, options: Mapping[str, Any] | None = None) -> Step:
        """Compile the program that makes the block.

        Args:
            dtype: of the computation, the parameters and the cache.
            options: of XLA's compiler.
        """
        model, text, empty, told = self._shapes(dtype)
        structure, params = split(model)
        run = self._rollout(model, options)

        def step(cache: ma.KVCache, told: Any) -> ma.KVCache:
            return self._again(run.block(self._reel(told, cache))[1].cache)

        def forward(cache: ma.KVCache, fixed: tuple[Any, Any]) -> Any:
            params, told = fixed
            return self._rollout(structure.merge(params)).block(self._reel(told, cache))[0]

        cache = self._at(empty)
        program = run.lower(self._reel(told, cache)).compile()
        draw = drawing((nnx.state(model), text, (empty.k, empty.v)))
        before = jax.jit(partial(self._once, structure)).lower(params, text).compile()

        def start() -> tuple[Any, Any]:
            held, given, (k, v) = draw()
            leaves = tuple(jax.tree.leaves(held))
            run.update(structure.merge(leaves))
            others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), replace(cache, k=(), v=()))
            return self._at(replace(others, k=k, v=v), self.frame), before(leaves, given)

        return Step(step, start, forward, (cache, (params, told)), program)

    def lowered(self, dtype: Any, put: Callable[[Any], Any]) -> Any:
        """Lower the program that makes the block for another machine.

        Args:
            dtype: as above.
            put: says of shapes where their arrays would be.
        """
        model, _, empty, told = self._shapes(dtype)
        structure, params = split(model)
        run = self._rollout(structure.merge(put(params)))
        return run.lower(self._reel(put(told), put(self._at(empty))))

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
        _, _, *sides, channels = self.work.shapes["latents"]
        rows, columns = sides
        return Rollout(model, self.stream, (rows, columns, channels), self.how, options=options)

    def _reel(self, told: Any, cache: ma.KVCache) -> Reel:
        return Reel(told, self.batch, self.frame, cache)

    def _at(self, cache: ma.KVCache, frame: int | None = None) -> ma.KVCache:
        """Put a cache before the block that is measured; the frame's number is left if not told."""
        number = cache.frame if frame is None else jnp.asarray(frame, jnp.int32)
        stage: Any = "empty" if self.first else "full"
        return replace(cache, frame=number, stage=stage, own=self.stream.frames_per_block)

    def _again(self, cache: ma.KVCache | None) -> ma.KVCache:
        """Go on to the next block, or back before this one where the next is another program."""
        assert cache is not None, "a rollout that keeps one was begun"
        rolls = self.stream.window is not None and not self.first
        return cache if rolls else self._at(cache, self.frame)

    # ---- figures ---------------------------------------------------------------------------------

    def facts(self, step: Step, ms: float) -> dict[str, Any]:
        """Collect what only blocks have: their sizes, and frames of video a second.

        Args:
            step: as `compiled` gave it.
            ms: of a block.
        """
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
    """Describe the passes of a block, at times that are even before their shift.

    Args:
        steps: of denoising.
        clean_pass: whether a last one keeps the clean block.

    Raises:
        InputError: there are no steps.
    """
    times = tuple(1000 * (steps - i) / steps for i in range(steps))
    return Denoising(times, clean_pass=clean_pass)
