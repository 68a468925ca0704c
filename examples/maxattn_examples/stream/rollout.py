"""Sample a video block by block with any model that takes a cache.

    for each step:  v, cache = model(x, t, cache);  x = next sample    writes noisy keys and values
    clean pass:     _, cache = model(x, 0, cache)                      overwrites them
    cache.advance()

All passes of a block are one compiled program, which serves every block once the window is full:
three programs for a video of any length. The cache is donated, so it is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import maxattn as ma
from maxattn.errors import InputError
from maxattn_examples.common.compiled import split

from .denoising import Denoising, noised
from .reel import Latents, Reel, check_unused

Choose = Callable[[int], Sequence[int]]


class Rollout:
    """Sample videos of any length.

    Args:
        model: called as `model(latents, t, kv=told, cache=cache)`, it returns a velocity and the
            cache; `model.cache(stream, batch, frames)` makes an empty one. After a change of the
            condition, `positions=` gives the frame numbers.
        stream: blocks, window and sink, as in the model's training.
        sides: rows, columns and channels of a frame of latents.
        how: times of the steps, sampler and clean pass.
        seed: of the noise. A frame's noise depends only on the seed, its batch row and its number,
            so
            a saved video continues bit for bit.
        re_prefill: True uses no cache: each block recomputes the frames of its window from position
            0, and its steps read their keys and values. Or a function that chooses these frames,
            whole blocks, from the number of the block's first frame.
        call: how to call the model, if not as above: `call(model, latents, t, told, **seen)`.
        time_scale: the time of pure noise; default 1000.
        options: of XLA's compiler, as `jax.jit(compiler_options=...)` takes them.

    >>> # rollout = Rollout(model, stream, sides=(60, 104, 16))
    >>> # reel = rollout.begin(model.encode(text))
    >>> # for block in range(100):
    >>> #     latents, reel = rollout.block(reel)
    """

    def __init__(
        self,
        model: Any,
        stream: ma.Stream,
        sides: tuple[int, int, int],
        how: Denoising | None = None,
        *,
        seed: int = 0,
        re_prefill: bool | Choose = False,
        call: Callable[..., Any] | None = None,
        time_scale: float = 1000.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.stream, self.sides, self.how = stream, sides, how or Denoising()
        self.call = call or (lambda model, x, t, told, **seen: model(x, t, kv=told, **seen))
        self.time_scale = time_scale
        self.re_prefill, self._choose = bool(re_prefill), _choice(re_prefill, stream)
        self._structure, self._parameters = split(model)
        self.seed, self._empty, self._key = seed, model.cache, jax.random.key(seed)
        own: Any = partial(jax.jit, static_argnums=4, compiler_options=dict(options or {}))
        self._make = own(self._make_block, donate_argnums=1)
        self._clean = own(self._clean_pass, donate_argnums=1)
        self._make_anew = own(self._make_block_anew)

    # ---- public methods --------------------------------------------------------------------------

    def begin(self, told: Any, batch: int = 1, frames: int | None = None, **how: Any) -> Reel:
        """Return the reel before the first block.

        Args:
            told: the model's condition, such as `model.encode(text)`; with guidance two batch rows
                for
                each video, the negative ones first.
            batch: number of videos.
            frames: the most frames that can be made with a stream without a window.
            how: further arguments of `model.cache`.
        """
        if self.re_prefill:
            return Reel(told, batch)
        cache = self._empty(self.stream, self.how.rows * batch, frames, **how)
        return Reel(told, batch, cache=cache)

    def prefix(self, reel: Reel, latents: Latents, *, at_once: bool = False) -> Reel:
        """Start with clean frames: an image, or a video to continue.

        Args:
            reel: from `begin`.
            latents: whole blocks; an image is the one frame of a stream with `first_frame_alone`.
            at_once: in one pass instead of one per block.

        Raises:
            InputError: the reel has frames already, or these are not whole blocks.
        """
        _check_prefix(reel, latents, self.stream, self.sides)
        count = latents.shape[1]
        if at_once and reel.cache is not None:
            reel = replace(reel, cache=reel.cache.prefix(count))
            return self._keep(reel, latents)
        for start, stop in self.stream.blocks(count):
            reel = self._keep(reel, latents[:, start:stop])
        return reel

    def block(self, reel: Reel) -> tuple[Latents, Reel]:
        """Sample the next block.

        Args:
            reel: is continued; its cache is donated.

        Returns:
            The latents, and the next reel.

        Raises:
            InputError: the reel was continued before.
        """
        check_unused(reel)
        frame = np.int32(reel.frame)
        if reel.cache is None:
            x = self._block_anew(reel)
            return x, self._gone_on(reel, x)
        x, cache = self._make(self._parameters, reel.cache, reel.told, frame, reel.batch)
        return x, self._gone_on(replace(reel, cache=cache.advance()), x)

    def blocks(self, reel: Reel, count: int) -> Iterator[tuple[Latents, Reel]]:
        """Sample `count` blocks, one after another."""
        for _ in range(count):
            x, reel = self.block(reel)
            yield x, reel

    def switch(self, reel: Reel, told: Any) -> Reel:
        """Change the condition, such as the prompt, from the next block on.

        The frames in the window are cached again under it, block by block from their clean latents,
        at
        their own positions: as if the video had begun with them under the new prompt.

        Args:
            reel: is continued; its cache is donated.
            told: as for `begin`.

        Raises:
            InputError: the reel was continued before.
        """
        check_unused(reel)
        reel = replace(reel, told=told)
        if reel.cache is None or not reel.frame:
            return reel
        kept, cache = self.stream.kept(reel.frame), reel.cache.refill()
        latents, done = reel.frames(kept), 0
        moved = len(kept) < reel.frame
        while done < len(kept):
            own = slice(done, done + cache.own)
            numbers = jnp.asarray(kept[own], jnp.int32) if moved else None
            cache = self._cached(cache, latents[:, own], told, done, numbers)
            done = own.stop
        return replace(reel, cache=cache.refilled(self.stream, reel.frame))

    def lower(self, reel: Reel) -> Any:
        """Lower the program for the next block, to compile it before weights are loaded.

        Args:
            reel: with a cache; it and the model may have shapes in place of arrays.

        Returns:
            jax's `Lowered`. Once it is compiled, `block` uses the program.
        """
        given = reel.cache, reel.told, np.int32(reel.frame)
        return self._make.lower(self._parameters, *given, reel.batch)

    def update(self, model: Any) -> None:
        """Replace the weights by another model's of the same structure; compiled programs stay.

        Raises:
            InputError: the structure differs.
        """
        structure, parameters = split(model)
        if structure != self._structure:
            rule = "compiled programs fit one structure: classes, layers and settings"
            remedy = "build it as the first one, or make another Rollout"
            raise InputError("model", "of another structure", rule, remedy)
        self._parameters = parameters

    @property
    def programs(self) -> int:
        """The number of compiled programs."""
        return self._make._cache_size() + self._make_anew._cache_size()

    # ---- one block -------------------------------------------------------------------------------

    def _gone_on(self, reel: Reel, x: Latents) -> Reel:
        after = reel.frame + x.shape[1]
        return replace(reel, frame=after, clean=reel.with_clean(x, self.stream.kept(after)))

    def _keep(self, reel: Reel, x: Latents) -> Reel:
        if reel.cache is not None:
            cache = self._cached(reel.cache, x, reel.told, reel.frame, None)
            reel = replace(reel, cache=cache)
        return self._gone_on(reel, x)

    def _cached(self, cache: Any, x: Latents, told: Any, frame: int, numbers: Any) -> ma.KVCache:
        given = x.astype(jnp.float32), numbers
        cache = self._clean(self._parameters, cache, told, (np.int32(frame), *given), len(x))
        return cache.advance()

    def _block_anew(self, reel: Reel) -> Latents:
        chosen = tuple(self._choose(reel.frame))
        _check_chosen(chosen, reel, self.stream)
        context = reel.frames(chosen) if chosen else None
        given = np.int32(reel.frame), context
        return self._make_anew(self._parameters, None, reel.told, given, reel.batch)

    # ---- programs --------------------------------------------------------------------------------

    def _make_block(
        self, parameters: Any, cache: ma.KVCache, told: Any, frame: Any, batch: int
    ) -> tuple[Latents, ma.KVCache]:
        numbers = frame + jnp.arange(cache.own)
        x, cache = self._denoised(parameters, cache, told, numbers, batch)
        if not self.how.clean_pass:
            return x, cache
        return x, self._clean_pass(parameters, cache, told, (frame, x, None), batch)

    def _denoised(
        self, parameters: Any, cache: Any, told: Any, numbers: Any, batch: int
    ) -> tuple[Latents, Any]:
        """Run all steps from noise to a sample; the written keys and values stay noisy."""
        how, draw = self.how, partial(self._noise, numbers, batch)
        sigmas = jnp.asarray(how.sigmas)

        def step(x: Any, cache: Any, at: Any) -> tuple[Any, Any]:
            sigma, after, number = at
            v, cache = self._velocity(parameters, x, sigma, told, cache)
            return how.step(x, how.guided(v), (sigma, after), draw(number)), cache

        steps = [sigmas[:-1], sigmas[1:], jnp.arange(1, len(sigmas))]
        return _scanned(step, draw(0), cache, steps, self._unread(cache))

    def _unread(self, cache: Any) -> int:
        """Count the first steps whose written keys and values no pass reads.

        The first block attends only to itself. Later ones read what its last pass writes.
        """
        if cache is None or cache.stage != "empty":
            return 0
        return len(self.how.denoising_steps) - (not self.how.clean_pass)

    def _clean_pass(
        self, parameters: Any, cache: ma.KVCache, told: Any, block: Any, batch: int
    ) -> ma.KVCache:
        """Write the keys and values of a clean block, with the context's noise."""
        (frame, x, positions), sigma = block, self.how.context_noise
        if sigma:
            numbers = frame + jnp.arange(x.shape[1]) if positions is None else positions
            x = noised(x, sigma, self._noise(numbers, batch, len(self.how.sigmas)))
        seen = {} if positions is None else {"positions": positions}
        return self._velocity(parameters, x, sigma, told, cache, **seen)[1]

    def _make_block_anew(
        self, parameters: Any, _: None, told: Any, block: Any, batch: int
    ) -> Latents:
        """Recompute the context of a block once, and sample the block."""
        frame, context = block
        stream, cache = self.stream, None
        own = stream.first_block if context is None else stream.frames_per_block
        if context is not None:
            endless = replace(stream, window=None, sink=0)
            count = context.shape[1]
            cache = self._empty(endless, self.how.rows * batch, count).prefix(count)
            cache = self._clean_pass(parameters, cache, told, (np.int32(0), context, None), batch)
            cache = cache.advance().cached()
        return self._denoised(parameters, cache, told, frame + jnp.arange(own), batch)[0]

    def _velocity(
        self, parameters: Any, x: Latents, sigma: Any, told: Any, cache: Any, **seen: Any
    ) -> tuple[Latents, Any]:
        """Call the model on every batch row of a block."""
        model = self._structure.merge(parameters)
        rows = jnp.concatenate([x] * self.how.rows)
        t = jnp.full(rows.shape[:2], sigma * self.time_scale, jnp.float32)
        if cache is None:
            return self.call(model, rows, t, told).astype(jnp.float32), None
        v, cache = self.call(model, rows, t, told, cache=cache, **seen)
        return v.astype(jnp.float32), cache

    def _noise(self, numbers: Any, batch: int, step: Any) -> Latents:
        """Draw the noise of frames, each from the seed, its batch row, its number and the step."""

        def of_frame(row: Any, number: Any) -> Any:
            key = jax.random.fold_in(jax.random.fold_in(self._key, row), number)
            return jax.random.normal(jax.random.fold_in(key, step), self.sides)

        of_row = jax.vmap(of_frame, in_axes=(None, 0))
        return jax.vmap(of_row, in_axes=(0, None))(jnp.arange(batch), numbers)


def _scanned(
    step: Callable[..., Any], x: Any, cache: Any, each: list[Any], unread: int
) -> tuple[Any, Any]:
    """Scan over steps; the first `unread` ones do not change the cache."""
    first, rest = (
        [values[part] for values in each] for part in (slice(unread), slice(unread, None))
    )
    if unread:
        alone = cache.unwritten()
        x, _ = jax.lax.scan(lambda x, at: (step(x, alone, at)[0], None), x, first)
    if not len(rest[0]):
        return x, cache
    return jax.lax.scan(lambda carry, at: (step(*carry, at), None), (x, cache), rest)[0]


def _choice(said: bool | Choose, stream: ma.Stream) -> Choose:
    """Return the function that chooses a block's context; default its whole window."""
    if callable(said):
        return said

    def window(frame: int) -> Sequence[int]:
        shown = stream.kept(frame + stream.frames_per_block)[: -stream.frames_per_block]
        whole = [n for n in range(len(shown) + 1) if n and stream.ends_block(n)]
        most = whole[-1] if whole else 0
        first = min(stream.sink, most)
        return (*shown[:first], *shown[len(shown) - most + first :])

    return window


# ---- refusals ------------------------------------------------------------------------------------


def _check_prefix(reel: Reel, latents: Any, stream: ma.Stream, sides: tuple[int, int, int]) -> None:
    check_unused(reel)
    if reel.frame:
        rule = f"a prefix must come first, and the reel has {reel.frame} frames"
        raise InputError("prefix", f"{latents.shape[1]} frames", rule, "give it after begin()")
    if latents.ndim != 5 or (latents.shape[0], *latents.shape[2:]) != (reel.batch, *sides):
        wanted = f"[{reel.batch}, F, {', '.join(map(str, sides))}]"
        remedy = "encode the image or video at this size"
        value = f"shape {tuple(latents.shape)}"
        raise InputError("prefix", value, f"clean latents are {wanted}", remedy)
    stream.check_frames("prefix", latents.shape[1])


def _check_chosen(frames: tuple[int, ...], reel: Reel, stream: ma.Stream) -> None:
    kept = {s + i for s, block in reel.clean for i in range(block.shape[1])}
    if lost := [f for f in frames if f not in kept]:
        rule = f"the reel has the clean latents of frames {sorted(kept)}"
        remedy = "choose some of these, or give the stream a wider window or a sink"
        raise InputError("re_prefill", f"frame {lost[0]}", rule, remedy)
    if frames:
        stream.check_frames("re_prefill", len(frames))
