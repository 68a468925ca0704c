"""The frames that a cache keeps, cached anew: each in its own slot, and the next one goes on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from tests.streaming.stack import Stack, clips, close, rollout, table
from tests.streaming.test_meshes import mesh_of
from tests.waiting import but

CASES = {
    "fills": (ma.Stream(2, 3, 4, sink=1), 9),
    "full": (ma.Stream(2, 3, 4, sink=1), 12),
    "rolled": (ma.Stream(2, 3, 4), 18),
    "rolled_sink": (ma.Stream(2, 3, 4, sink=3), 21),
    "rolled_odd_sink": (ma.Stream(2, 3, 4, sink=1), 24),
    "alone": (ma.Stream(2, 3, 4, first_frame_alone=True), 16),
    "alone_sink": (ma.Stream(2, 3, 3, sink=1, first_frame_alone=True), 16),
    "endless": (ma.Stream(2, 3), 9),
}


def by_frames(x: Any, frames: tuple[int, ...]) -> np.ndarray:
    """Take the two tokens of each frame, along axis 1."""
    return np.concatenate([x[:, 2 * f : 2 * f + 2] for f in frames], axis=1)


def anew(stack: Stack, stream: ma.Stream, made: ma.KVCache, clean: Any) -> ma.KVCache:
    """Run the kept frames as blocks, each with its own positions."""
    end = int(made.frame)
    kept, cache, whole = stream.kept(end), made.refill(), table(stream, end)
    x = by_frames(clean, kept)
    turns = (by_frames(a[None], kept)[0] for a in (whole.cos, whole.sin))
    cos, sin = turns
    while int(cache.frame) < len(kept):
        own = slice(2 * int(cache.frame), 2 * int(cache.frame) + cache.tokens)
        _, cache = stack.jitted(x[:, own], 0.0, ma.Rotary(cos[own], sin[own]), cache)
        cache = cache.advance()
    return cache.refilled(stream, end)


def next_block(stack: Stack, stream: ma.Stream, cache: ma.KVCache, x: Any) -> jax.Array:
    angles = table(stream, cache.own, int(cache.frame))
    return stack.jitted(x[:, : cache.tokens], 0.0, angles, cache)[0]


@pytest.mark.parametrize("case", but(CASES, ["fills", "alone_sink"]))
def test_layers_that_see_no_other_frames_are_cached_alike(case: str) -> None:
    """Keys and values of the first layer depend on their own frame alone: they are the old ones."""
    stream, end = CASES[case]
    stack, (clean, _) = Stack.make(), clips(stream, end + 3)
    frames = None if stream.window else end + 3
    cache = stack.cache(stream, frames=frames)
    made = rollout(stack, stream, cache, clean[:, : 2 * end], clean[:, : 2 * end]).cache
    k, v = made.k[0], made.v[0]  # the cache itself is used up
    again = anew(stack, stream, made, clean)
    close(again.k[0], k)
    close(again.v[0], v)
    assert (int(again.frame), again.stage, again.own) == (end, made.stage, made.own)
    assert again.layout == made.layout


@pytest.mark.parametrize("case", but(["rolled_odd_sink", "alone_sink"], ["rolled_odd_sink"]))
def test_the_next_block_sees_the_frames_that_were_cached_anew(case: str) -> None:
    """As that of a video that began with these frames, at these positions."""
    stream, end = CASES[case]
    stack, (clean, noisy) = Stack.make(), clips(stream, end + 3)
    part = clean[:, : 2 * end]
    made = rollout(stack, stream, stack.cache(stream), part, part).cache
    again = anew(stack, stream, made, clean)
    kept, x = stream.kept(end), noisy[:, 2 * end :]
    # Without slots: one forward over what is kept and the block, numbered from 0 on by the mask.
    order = (*kept, *range(end, end + 3))
    whole = table(stream, end + 3)
    every = np.concatenate([by_frames(clean, kept), x], axis=1)
    cos, sin = (by_frames(a[None], order)[0] for a in (whole.cos, whole.sin))
    mask = ma.Stream(2, 3, stream.window, stream.sink).mask(len(order))
    want = jax.jit(stack.forward, static_argnums=3)(
        every, jnp.zeros((1, 1, 1)), ma.Rotary(cos, sin), mask
    )
    close(next_block(stack, stream, again, x), want[:, -6:])


@pytest.mark.parametrize("layout", but(["heads", "tokens"], ["tokens"]))
def test_on_a_mesh(layout: str) -> None:
    stream = ma.Stream(2, 3, 3, sink=1)
    mesh, (clean, noisy) = mesh_of("context 2"), clips(stream, 15)
    made = []
    for where in (None, mesh):
        stack = Stack.make(mesh=where)
        cache = stack.cache(stream, mesh=where, context=layout if where is not None else "heads")
        again = anew(stack, stream, rollout(stack, stream, cache, clean, clean).cache, clean)
        made.append(next_block(stack, stream, again, noisy))
    close(made[1], made[0])
