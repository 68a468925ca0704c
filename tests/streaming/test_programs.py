"""A rollout of any length needs at most three programs, and none of them copies the cache."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from tests.streaming.stack import (
    APART,
    Stack,
    clips,
    close,
    rollout,
    skipped,
    table,
)

STREAM = ma.Stream(2, 3, 3, sink=2)


def copies(text: str, size: int) -> list[str]:
    """List copies of at least so many numbers in a compiled program."""
    found = []
    for line in text.splitlines():
        made = re.search(r"= f32\[([\d,]+)\]\S* (copy|copy-start)\(", line)
        if made and np.prod([int(n) for n in made[1].split(",")]) >= size:
            found.append(line.strip())
    return found


@pytest.mark.parametrize(
    ("stage", "rows", "per_layer"),
    [
        ("empty", False, False),
        ("filling", True, False),
        ("full", False, False),
        ("filling", False, True),
        ("full", True, True),
    ],
)
def test_no_program_copies_the_cache(stage: str, rows: bool, per_layer: bool) -> None:
    stack = APART if per_layer else Stack.make()
    cache = stack.cache(STREAM, batch=2, per_layer=per_layer)
    while cache.stage != stage:
        cache = skipped(cache)
    if rows:
        cache = ma.KVCache.stacked([cache, cache])
    clean, _ = clips(STREAM, 3, batch=cache.shape[1])
    step = jax.jit(stack.step, donate_argnums=3)
    program = step.lower(clean, 0.0, table(STREAM, 3), cache).compile()
    # A CPU's attention copies what it transposes; none of that has the axes of a layer's cache.
    first = jax.tree.leaves(cache.k)[0]
    form = f"= f32[{','.join(map(str, first.shape))}]" if per_layer else ""
    assert not [line for line in copies(program.as_text(), first.size) if form in line]
    memory: Any = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes


def test_a_copy_is_seen() -> None:
    """If layers return their part of the cache, the program copies all of it."""
    cache = Stack.make().cache(STREAM)

    def body(x: jax.Array, kv: Any) -> Any:
        return x + 1, jax.tree.map(lambda a: a.at[:, :4].set(x.sum()), kv)

    def step(x: jax.Array, cache: ma.KVCache) -> Any:
        return jax.lax.scan(body, x, (cache.k, cache.v))

    program = jax.jit(step, donate_argnums=1).lower(jnp.ones(3), cache).compile()
    assert copies(program.as_text(), cache.k.size)


def test_blocks_in_a_scan_are_one_program() -> None:
    """A rollout inside one jit keeps the stage "filling", which is right for every block."""
    stack, stream = Stack.make(), ma.Stream(2, 3, 2, sink=1)
    clean, _ = clips(stream, 12)
    angles = table(stream, 12)
    made = rollout(stack, stream, stack.cache(stream), clean, clean)
    cut = lambda x: x.reshape(4, -1, *x.shape[1:])  # noqa: E731
    turns = ma.Rotary(cut(jnp.asarray(angles.cos)), cut(jnp.asarray(angles.sin)))
    x = jnp.swapaxes(cut(jnp.swapaxes(clean, 0, 1)), 1, 2)

    @jax.jit
    def run(x: jax.Array, turns: Any, cache: ma.KVCache) -> jax.Array:
        first = jax.tree.map(lambda a: a[0], turns)
        y, cache = stack.step(x[0], 0.0, first, cache)

        def block(cache: ma.KVCache, at: Any) -> Any:
            y, cache = stack.step(at[0], 0.0, at[1], cache)
            return cache.advance(), y

        rest = (x[1:], jax.tree.map(lambda a: a[1:], turns))
        return jnp.concatenate([y[None], jax.lax.scan(block, cache.advance(), rest)[1]])

    out = run(x, turns, stack.cache(stream))
    close(jnp.concatenate(list(out), axis=1), made.clean)
