"""A small stack of layers with times per frame: teacher-forced in one forward, or with a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import maxattn as ma
from maxattn.rope import Rotary

WIDTH, HEADS, DIM_HEAD, LAYERS = 16, 4, 8, 2
CLEAN = 0.0
NOISY = 0.7


class Block(nnx.Module):
    """Self-attention and an MLP, both on states scaled by the time of their frame."""

    def __init__(self, kv_heads: int, rngs: nnx.Rngs, **how: Any) -> None:
        sizes = {"heads": HEADS, "kv_heads": kv_heads, "dim_head": DIM_HEAD}
        self.attn = ma.FlaxAttention(WIDTH, qk_norm="rms_norm", rngs=rngs, **sizes, **how)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, times: jax.Array, cache: Any = None, **how: Any) -> Any:
        times = jnp.asarray(times, x.dtype)
        scaled = x * (1 + times)
        if cache is None:
            y = self.attn(scaled, **how)
        else:
            y, cache = self.attn(scaled, cache=cache, **how)
        x = x + y
        x = x + self.down(jax.nn.gelu(self.up(x * (1 - 0.5 * times))))
        return x if cache is None else (x, cache)


class Stack(NamedTuple):
    """The graph of one layer, and the parameters of all layers, stacked along their first axis."""

    graph: Any
    state: Any

    @classmethod
    @lru_cache
    def make(cls, kv_heads: int = HEADS, seed: int = 0, **how: Any) -> Stack:
        """Build layers; all tests share them, and none changes them."""
        blocks = [Block(kv_heads, nnx.Rngs(seed + i), **how) for i in range(LAYERS)]
        graph, _ = nnx.split(blocks[0])
        states = [nnx.state(b) for b in blocks]
        return cls(graph, jax.tree.map(lambda *x: jnp.stack(x), *states))

    def forward(self, x: jax.Array, times: jax.Array, rotary: Rotary, mask: Any) -> jax.Array:
        def layer(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
            return nnx.merge(self.graph, state)(x, times, rotary_emb=rotary, mask=mask), None

        return jax.lax.scan(layer, x, self.state)[0]

    def step(
        self, x: jax.Array, times: Any, rotary: Any, cache: ma.KVCache, mask: Any = None
    ) -> Any:
        """Run a block through all layers, with the cache as the scan's carry."""

        def layer(carry: Any, at: Any) -> tuple[Any, None]:
            (x, cache), (index, state) = carry, at
            how = {"rotary_emb": rotary, "cache": cache.layer(index), "mask": mask}
            return nnx.merge(self.graph, state)(x, times, **how), None

        return jax.lax.scan(layer, (x, cache), (jnp.arange(LAYERS), self.state))[0]

    def jitted(self, *args: Any) -> Any:
        """Return a jitted `step` that all stacks of this graph share; it donates the cache."""
        return _step(type(self), self.graph, self.state, *args)

    def cache(self, stream: ma.Stream, batch: int = 1, kv_heads: int = HEADS, **how: Any) -> Any:
        sizes = {"layers": LAYERS, "batch": batch, "kv_heads": kv_heads, "dim_head": DIM_HEAD}
        return stream.cache(**sizes, **{"dtype": "float32", **how})


class Apart(Stack):
    """Run the layers one after another, each with its own part of the cache."""

    def step(
        self, x: jax.Array, times: Any, rotary: Any, cache: ma.KVCache, mask: Any = None
    ) -> Any:
        for index in range(LAYERS):
            state = jax.tree.map(lambda a, i=index: a[i], self.state)
            how = {"rotary_emb": rotary, "cache": cache.layer(index), "mask": mask}
            x, cache = nnx.merge(self.graph, state)(x, times, **how)
        return x, cache


APART = Apart(*Stack.make())


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=6)
def _step(
    kind: type[Stack], graph: Any, state: Any, x: Any, times: Any, rotary: Any, cache: Any
) -> Any:
    return kind(graph, state).step(x, times, rotary, cache)


def clips(stream: ma.Stream, frames: int, batch: int = 1) -> np.ndarray:
    """Draw a clean clip and a noisy one, [2, B, T, C], in numpy, to slice without a program."""
    rng = np.random.default_rng(frames)
    shape = (2, batch, frames * stream.tokens_per_frame, WIDTH)
    return rng.normal(size=shape).astype(np.float32)


def table(stream: ma.Stream, frames: int, first: int = 0) -> Rotary:
    """Make the rotary table of frames from `first` on."""
    tokens = stream.tokens_per_frame
    whole = ma.rope_1d(DIM_HEAD, (first + frames) * tokens)
    return whole.split(first * tokens)[1] if first else whole


def teacher_forward(
    stack: Stack, stream: ma.Stream, clean: Any, noisy: Any, shards: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of both clips from one forward under the teacher-forcing mask."""
    angles = table(stream, clean.shape[1] // stream.tokens_per_frame)
    return _teacher(stack.graph, stream, shards, stack.state, clean, noisy, angles)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _teacher(
    graph: Any, stream: ma.Stream, shards: int, state: Any, clean: Any, noisy: Any, angles: Rotary
) -> tuple[jax.Array, jax.Array]:
    x, one = stream.pair(clean, noisy, shards), jnp.ones((1, clean.shape[1], 1))
    times = stream.pair(CLEAN * one, NOISY * one, shards)
    cos, sin = (stream.pair(a, a, shards, axis=0) for a in (angles.cos, angles.sin))
    mask = stream.teacher_mask(clean.shape[1] // stream.tokens_per_frame, shards)
    out = Stack(graph, state).forward(x, times, Rotary(cos, sin), mask)
    return stream.unpair(out, shards)


class Rollout(NamedTuple):
    """The outputs of all blocks [B, T, C], the cache after the last, and the number of programs."""

    clean: np.ndarray
    noisy: np.ndarray
    cache: ma.KVCache
    programs: int


def rollout(
    stack: Stack,
    stream: ma.Stream,
    cache: ma.KVCache,
    clean: Any,
    noisy: Any,
    first: int = 0,
    place: Callable[[Any], Any] = lambda x: x,
) -> Rollout:
    """Run a noisy pass and a clean pass of every block over the cache; frames count from `first`.

    `place` puts a block on the devices of a mesh.
    """
    before, outs = programs(_step), []
    tokens = stream.tokens_per_frame
    for start, stop in stream.blocks(clean.shape[1] // tokens):
        own = slice(start * tokens, stop * tokens)
        angles = table(stream, stop - start, first + start)
        if not cache.layout.is_roped:
            angles = table(stream, cache.layout.frames)
        y_noisy, cache = stack.jitted(place(noisy[:, own]), NOISY, angles, cache)
        y_clean, cache = stack.jitted(place(clean[:, own]), CLEAN, angles, cache)
        cache = cache.advance()
        outs.append((np.asarray(y_clean), np.asarray(y_noisy)))
    both = (np.concatenate(y, axis=1) for y in zip(*outs, strict=True))
    return Rollout(*both, cache, programs(_step) - before)


def skipped(cache: ma.KVCache, times: int = 1) -> ma.KVCache:
    """Advance the cache without a pass, which users cannot, to test its stage."""
    for _ in range(times):
        cache = replace(cache).advance()
    return cache


def programs(step: Any) -> int:
    """Count the compiled programs of a jitted function."""
    return step._cache_size()


close = partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
