"""Cache contents that stay for long: prefixes, batch rows that continue together, fixed tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import masks as M
from tests.streaming.stack import (
    HEADS,
    WIDTH,
    Stack,
    clips,
    close,
    skipped,
    table,
)

STREAM = ma.Stream(2, 3, 2, sink=1)
SIZES: Any = {"layers": 1, "kv_heads": HEADS, "dim_head": 8, "dtype": "float32"}


def layer() -> ma.FlaxAttention:
    sizes = {"heads": HEADS, "dim_head": 8, "qk_norm": "rms_norm"}
    return ma.FlaxAttention(WIDTH, rngs=nnx.Rngs(0), **sizes)


@pytest.mark.parametrize("how", [{}, {"positions": "slots_with_sink"}, {"per_layer": True}])
def test_an_unwritten_cache_stays_as_it_is(how: dict[str, Any]) -> None:
    """Its passes give the same results as writing ones; a later pass that writes is unaffected."""
    attn, x = layer(), clips(STREAM, 3)
    cache = STREAM.cache(**SIZES, batch=1, **how)
    angles = table(STREAM, cache.layout.frames if "positions" in how else 3)
    step = jax.jit(lambda x, cache: attn(x, rotary_emb=angles, cache=cache.layer(0)))
    noisy, left = step(x[1], cache.unwritten())
    written, _ = step(x[1], cache)
    np.testing.assert_array_equal(noisy, written)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(left))
    assert repr(left) == repr(cache.unwritten()) and "empty, unwritten" in repr(left)
    _, kept = step(x[0], cache)
    assert all(np.any(leaf) for leaf in jax.tree.leaves((kept.k, kept.v)))


def test_an_unwritten_cache_lets_gradients_pass() -> None:
    """Nothing is written, so the gradients equal those of the block without a cache."""
    attn, (x, _) = layer(), clips(STREAM, 3)
    unwritten, angles = STREAM.cache(**SIZES, batch=1).unwritten().layer(0), table(STREAM, 3)

    def gradient(out: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return jax.jit(jax.grad(lambda x: jnp.square(out(x)).sum()))(x)

    close(
        gradient(lambda x: attn(x, rotary_emb=angles, cache=unwritten)[0]),
        gradient(lambda x: attn(x, rotary_emb=angles)),
    )


def test_rows_are_read_as_full_once_all_of_them_are() -> None:
    cache = Stack.make().cache(STREAM)
    fill = [cache := skipped(cache) for _ in range(3)]
    part, whole = ma.KVCache.stacked(fill[:2]), ma.KVCache.stacked(fill[1:])
    assert (part.cached().stage, whole.cached().stage) == ("filling", "full")


# ---- tokens that never change --------------------------------------------------------------------

REFERENCE = ma.Stream(5)
X, REFS = jax.random.normal(jax.random.key(0), (2, 12, WIDTH)), 5


def empty(frames: int = 1, stream: ma.Stream = REFERENCE) -> ma.KVCache:
    return stream.cache(**SIZES, batch=2, frames=frames)


def test_references_are_extracted_once_and_read_in_later_steps() -> None:
    """Reference tokens attend only to themselves: later steps need only keys and values."""
    attn, length, own = layer(), X.shape[1], X.shape[1] - REFS
    mask = M.Rectangle(0, own, 0, length) | M.Rectangle(own, length, own, length)
    angles = ma.rope_1d(8, length)
    want = attn(X, rotary_emb=angles, mask=mask)
    given = {"rotary_emb": angles, "mask": mask}
    y, refs = attn(X, cache=empty().extract(start=own).layer(0), **given)
    close(y, want)
    refs = refs.advance().cached()
    assert refs.stage == "full"
    y, again = attn(X[:, :own], rotary_emb=angles.split(own)[0], cache=refs.layer(0))
    close(y, want[:, :own])
    assert again.k is refs.k


def test_references_are_made_alone_and_appended() -> None:
    attn, own = layer(), X.shape[1] - 2 * REFS
    kept = []
    for i in range(2):
        part = slice(own + i * REFS, own + (i + 1) * REFS)
        _, cache = attn(X[:, part], cache=empty().layer(0))
        kept.append(cache.advance())
    both = kept[0].append(kept[1]).cached()
    assert both.layout.frames == 2 and both.k.shape[2] == 2 * REFS
    y, _ = attn(X[:, :own], cache=both.layer(0))
    ends = own, own + REFS, own + 2 * REFS
    mask = M.Rectangle(0, own, 0, ends[2])
    for start, stop in pairwise(ends):
        mask = mask | M.Rectangle(start, stop, start, stop)
    close(y, attn(X, mask=mask)[:, :own])


def test_a_cache_that_is_not_full_is_read_as_far_as_it_goes() -> None:
    """Chosen frames are computed once, and all steps of a block read them without writing."""
    attn, stream = layer(), ma.Stream(2, 1)
    cache = empty(frames=5, stream=stream).prefix(3)
    y, cache = attn(X[:, :6], cache=cache.layer(0))
    cache = cache.advance().cached()
    assert cache.stage == "filling"
    y, _ = jax.jit(lambda x, c: attn(x, cache=c.layer(0)))(X[:, 6:], cache)
    mask = M.Rectangle(0, 6, 0, 6) | M.Rectangle(6, 12, 0, 12)
    close(y, attn(X, mask=mask)[:, 6:])


def test_a_cache_is_written_after_it_was_read() -> None:
    """`cached` shares the values, and the cache itself continues."""
    attn, cache = layer(), empty(frames=3, stream=ma.Stream(2, 1))
    _, cache = attn(X[:, :2], cache=cache.layer(0))
    cache = cache.advance()
    attn(X[:, 2:4], cache=cache.cached().layer(0))
    _, cache = attn(X[:, 2:4], cache=cache.layer(0))
    assert cache.advance().stage == "full" and np.asarray(cache.k[0, :, :4]).any(axis=(2, 3)).all()


def test_what_is_read_alone_is_a_constant() -> None:
    attn, cache = layer(), empty(frames=1, stream=ma.Stream(2, 1))
    _, cache = attn(X[:, :2], cache=cache.layer(0))
    kept = cache.advance().cached()

    def loss(k: jax.Array, v: jax.Array) -> jax.Array:
        return (attn(X[:, 2:4], cache=replace(kept, k=k, v=v).layer(0))[0] ** 2).sum()

    assert float(loss(kept.k, kept.v)) != float(loss(kept.k, 2 * kept.v))
    for gradient in jax.jit(jax.grad(loss, (0, 1)))(kept.k, kept.v):
        np.testing.assert_array_equal(gradient, 0)
