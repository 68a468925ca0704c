"""A cache with one array per layer has the same content as one array of all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import maxattn as ma
from tests.streaming.stack import (
    APART,
    Apart,
    Stack,
    clips,
    close,
    rollout,
    teacher_forward,
)
from tests.waiting import but

STREAM = ma.Stream(2, 3, 3, sink=2)


def joined(cache: ma.KVCache) -> tuple[jax.Array, jax.Array]:
    return jnp.concatenate(list(cache.k)), jnp.concatenate(list(cache.v))


def test_a_rollout_is_that_of_one_array() -> None:
    stream = ma.Stream(2, 3, 2, sink=1, first_frame_alone=True)
    clean, noisy = clips(stream, 10)
    want = rollout(Stack.make(), stream, APART.cache(stream), clean, noisy)
    got = rollout(APART, stream, APART.cache(stream, per_layer=True), clean, noisy)
    close(got.clean, want.clean)
    close(got.noisy, want.noisy)
    for mine, theirs in zip(joined(got.cache), (want.cache.k, want.cache.v), strict=True):
        close(mine, theirs)
    assert got.programs <= 3 and repr(got.cache) == repr(want.cache)
    assert got.cache.nbytes == want.cache.nbytes and got.cache.shape == want.cache.shape


@pytest.mark.slow
def test_tokens_that_are_kept_are_appended_in_each_layer() -> None:
    endless, (clean, noisy) = ma.Stream(2, 3), clips(STREAM, 3)
    kept = [
        rollout(stack, endless, stack.cache(endless, frames=3, per_layer=stack is APART), clean,
                noisy).cache
        for stack in (Stack.make(), APART)
    ]  # fmt: skip
    close(joined(kept[1].append(kept[1]))[1], kept[0].append(kept[0]).v)


@pytest.mark.parametrize("context", but(["heads", "tokens"], ["heads"]))
def test_on_a_mesh_each_layer_lies_as_the_whole_does(context: str) -> None:
    config = ma.AttentionConfig(ici_context_parallelism=2, ici_tensor_parallelism=2)
    mesh = config.make_mesh(jax.devices()[:4])
    how = {"mesh": mesh, "context": context}
    whole, apart = (APART.cache(STREAM, per_layer=per, **how) for per in (False, True))
    shard = whole.k.sharding.shard_shape(whole.k.shape)
    for array in (*apart.k, *apart.v):
        assert array.sharding.shard_shape(array.shape) == (1, *shard[1:])
    stack = Apart(*Stack.make(config=config, mesh=mesh))
    clean, noisy = clips(STREAM, 6)
    _, want = teacher_forward(Stack.make(), STREAM, clean, noisy)
    close(rollout(stack, STREAM, apart, clean, noisy).noisy, want)
