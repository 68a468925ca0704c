"""Self-forcing: the gradient of a rollout whose cached keys and values are constants.

It equals that of one forward of all noisy blocks, under the teacher-forcing mask, over the cache of
a clean pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.rope import Rotary
from tests.streaming.stack import LAYERS, NOISY, Stack, clips, close, table, teacher_forward
from tests.streaming.test_meshes import mesh_of
from tests.waiting import but


def block_rollout(stack: Stack, stream: ma.Stream, clean: jax.Array, noisy: jax.Array) -> Any:
    """Run block by block in plain jax, with lists of constant keys and values of clean blocks."""
    frames = clean.shape[1] // stream.tokens_per_frame
    sees = np.asarray(
        ma.Stream(1, *stream._of_blocks()[1:])
        .mask(frames)
        .bind(frames, frames)
        .allowed(np.arange(frames), np.arange(frames))
    )[0, 0]
    constant = stack._replace(state=jax.lax.stop_gradient(stack.state))
    kept: list[dict[int, Any]] = [{} for _ in range(LAYERS)]
    outs = []
    for start, stop in stream.blocks(frames):
        own = slice(start * stream.tokens_per_frame, stop * stream.tokens_per_frame)
        seen = [f for f in range(start) if sees[start, f]]
        turn = table(stream, stop - start, start)
        outs.append(one_pass(stack, noisy[:, own], NOISY, turn, kept, seen)[0])
        _, made = one_pass(constant, clean[:, own], 0.0, turn, kept, seen)
        for layer, (k, v) in zip(kept, made, strict=True):
            parts = (jnp.split(jax.lax.stop_gradient(x), stop - start, axis=1) for x in (k, v))
            layer |= dict(zip(range(start, stop), zip(*parts, strict=True), strict=True))
    return jnp.concatenate(outs, axis=1)


def one_pass(
    stack: Stack,
    x: jax.Array,
    time: float,
    turn: Rotary,
    kept: list[dict[int, Any]],
    seen: list[int],
) -> Any:
    """Run one block through all layers; its keys follow those of its visible frames."""
    made = []
    for index, slots in enumerate(kept):
        block = nnx.merge(stack.graph, jax.tree.map(lambda a, i=index: a[i], stack.state))
        scaled = x * (1 + time)
        q, k, v = block.attn._heads(scaled, *block.attn._queries_and_keys(scaled, turn, turn))
        made.append((k, v))
        keys, values = (
            jnp.concatenate([*(slots[f][i] for f in seen), own], axis=1)
            for i, own in enumerate((k, v))
        )
        scores = jnp.einsum("btnh,bsnh->bnts", q, keys) * q.shape[-1] ** -0.5
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), values)
        x = x + block.attn._output(out, scaled, None, None)
        x = x + block.down(jax.nn.gelu(block.up(x * (1 - 0.5 * time))))
    return x, made


def one_forward(stack: Stack, stream: ma.Stream, clean: jax.Array, noisy: jax.Array) -> Any:
    """Cache the keys and values of all clean frames, then run all noisy blocks at once."""
    frames = clean.shape[1] // stream.tokens_per_frame
    turn = table(stream, frames)
    constant = stack._replace(state=jax.lax.stop_gradient(stack.state))
    every = stack.cache(ma.Stream(stream.tokens_per_frame), frames=frames)
    every = every.prefix(frames).extract()
    _, every = constant.step(clean, 0.0, turn, every, mask=stream.mask(frames))
    kept = every.advance().cached()
    return stack.step(noisy, NOISY, turn, kept, mask=stream.teacher_mask(frames))[0]


@pytest.mark.slow
def test_the_gradient_of_a_rollout_is_that_of_one_forward() -> None:
    stack, stream = Stack.make(), ma.Stream(2, 2, 2, sink=1, first_frame_alone=True)
    clean, noisy = clips(stream, 5)
    weight = jax.random.normal(jax.random.key(1), noisy.shape)

    def loss(f: Any) -> Any:
        def of_state(state: Any, noisy: jax.Array) -> Any:
            out = f(stack._replace(state=state), stream, clean, noisy)
            return (out * weight).mean(), out

        return jax.jit(jax.value_and_grad(of_state, (0, 1), has_aux=True))

    (_, out), grads = loss(one_forward)(stack.state, noisy)
    (_, want), wanted = loss(block_rollout)(stack.state, noisy)
    close(out, want)
    close(out, teacher_forward(stack, stream, clean, noisy)[1])
    for got, one in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, one, atol=1e-6)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted)) > 1e-2


@pytest.mark.parametrize("layout", but(["heads", "tokens"], ["heads"]))
def test_reading_is_differentiated_on_a_mesh(layout: str) -> None:
    stream = ma.Stream(4, 2)
    clean, noisy = clips(stream, 4)
    found = []
    for mesh in (mesh_of("context 2"), None):
        stack = Stack.make(mesh=mesh)
        cache = stack.cache(stream, frames=4, mesh=mesh, context=layout).prefix(4)
        kept = stack.step(clean, 0.0, table(stream, 4), cache)[1].advance().cached()

        def loss(state: Any, noisy: jax.Array, stack: Stack = stack, kept: Any = kept) -> jax.Array:
            turn = table(stream, 4, 4)
            out, _ = stack._replace(state=state).step(noisy, NOISY, turn, kept)
            return (out**2).mean()

        found.append(jax.jit(jax.grad(loss, (0, 1)))(stack.state, noisy))
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        close(got, want, atol=1e-6)
