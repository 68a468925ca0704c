"""Blocks made one by one with a cache equal one forward under the teacher-forcing mask: on one
device, with arrays of each layer, and on meshes, with heads or tokens of the cache over context.

Drawn streams (tests/fuzz/streams.py) equal a video in float64 that keeps every key.
"""

from __future__ import annotations

import re
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.sharding import batch_sharding
from maxattn.streaming.attend import merged_over_devices
from tests.fuzz.loop import draw
from tests.fuzz.run import describe, run
from tests.streaming.stack import (
    APART,
    HEADS,
    NOISY,
    Apart,
    Stack,
    clips,
    close,
    rollout,
    skipped,
    table,
    teacher_forward,
)
from tests.waiting import but

STREAM = ma.Stream(4, 3, 3, sink=2)
# Batch rows of different fill on a mesh; a prefix longer than the window, x64; recomputed frames of
# a window that dropped some, with a sink; positions by slots with a sink; a first frame alone.
QUICK = (0, 15, 24, 31, 35, 58)


@pytest.mark.parametrize("seed", but(range(60), QUICK))
def test_passes_are_those_of_a_video_that_keeps_every_key(seed: int) -> None:
    outcome = run(draw(f"streams:{seed}", describe()))
    assert outcome.kind == "right", f"{outcome.what}\n{outcome.snippet}"


WITHIN = {"float32": 1e-5, "bfloat16": 0.05}


@pytest.mark.parametrize("dtype", WITHIN)
def test_every_block_is_that_of_teacher_forcing(dtype: str) -> None:
    """With few key heads, and with frames that leave the window."""
    stream = ma.Stream(2, 3, 2, sink=1, first_frame_alone=dtype == "float32")
    stack = Stack.make(kv_heads=2, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    stack = stack._replace(state=jax.tree.map(lambda x: x.astype(dtype), stack.state))
    clean, noisy = (x.astype(jnp.dtype(dtype)) for x in clips(stream, stream.first_block + 9, 2))
    cache = stack.cache(stream, 2, kv_heads=2, dtype=dtype)
    made = rollout(stack, stream, cache, clean, noisy)
    want_clean, want_noisy = teacher_forward(stack, stream, clean, noisy)
    for got, want in ((made.clean, want_clean), (made.noisy, want_noisy)):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.abs(got - want).max() < WITHIN[dtype] * np.abs(want).max()
    assert made.programs <= 3


def test_the_number_of_the_first_frame_changes_nothing() -> None:
    """The host computes tables in float64, so angles at frame 50,000 are as exact as at frame 0."""
    stream, stack = ma.Stream(2, 3, 2, sink=1), Stack.make()
    clean, noisy = clips(stream, 12)
    early, late = (
        rollout(stack, stream, stack.cache(stream), clean, noisy, first) for first in (0, 50_000)
    )
    close(late.clean, early.clean, atol=1e-4)
    close(late.noisy, early.noisy, atol=1e-4)


# ---- arrays of each layer ------------------------------------------------------------------------


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


# ---- meshes --------------------------------------------------------------------------------------

MESHES = {
    "tensor 2": {"tensor": 2},
    "context 2": {"context": 2},
    "context 4": {"context": 4},
    "context 2, tensor 2": {"context": 2, "tensor": 2},
    "data 2, context 2, tensor 2": {"data": 2, "context": 2, "tensor": 2},
}
CASES = [
    (name, layout)
    for name in MESHES
    for layout in ("heads", "tokens")
    if layout == "heads" or "context" in name
]


def mesh_of(name: str) -> jax.sharding.Mesh:
    sizes = {"data": 1} | MESHES[name]
    config = ma.AttentionConfig(**{f"ici_{k}_parallelism": v for k, v in sizes.items()})
    return config.make_mesh(jax.devices()[: prod(sizes.values())])


# Meshes of few axes are what these are made of.
FEW = [("context 4", "tokens"), ("data 2, context 2, tensor 2", "heads")]


@pytest.mark.parametrize(("name", "layout"), but(CASES, FEW))
def test_a_rollout_on_a_mesh(name: str, layout: str) -> None:
    mesh, batch, frames = mesh_of(name), 2, 12
    stack = Stack.make(mesh=mesh)
    clean, noisy = clips(STREAM, frames, batch)
    cache = stack.cache(STREAM, batch, mesh=mesh, context=layout)
    place = partial(jax.device_put, device=batch_sharding(mesh, 3))
    made = rollout(stack, STREAM, cache, clean, noisy, place=place)
    want_clean, want_noisy = teacher_forward(Stack.make(), STREAM, clean, noisy)
    close(made.clean, want_clean)
    close(made.noisy, want_noisy)
    shard = made.cache.k.addressable_shards[0].data
    assert shard.size * mesh.size == made.cache.k.size
    context, tensor = (mesh.shape.get(axis, 1) for axis in ("context", "tensor"))
    heads, tokens = (context, 1) if layout == "heads" else (1, context)
    assert shard.shape[2:4] == (36 // tokens, HEADS // (heads * tensor))


@pytest.mark.parametrize("layout", but(["heads", "tokens"], ["tokens"]))
def test_kept_tokens_are_read_on_a_mesh(layout: str) -> None:
    mesh, stream = mesh_of("context 2"), ma.Stream(4, 1)
    clean, _ = clips(stream, 6, batch=2)
    outs = []
    for where in (mesh, None):
        stack = Stack.make(mesh=where)
        how = {"frames": 2, "mesh": where, "context": layout}
        kept = []
        for start in (0, 8):
            cache = stack.cache(stream, 2, **how).prefix(2)
            _, cache = stack.jitted(clean[:, start : start + 8], 0.0, None, cache)
            kept.append(cache.advance())
        both = kept[0].append(kept[1]).cached()
        outs.append(stack.jitted(clean[:, 16:], 0.0, None, both)[0])
    close(*outs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", but(["heads", "tokens"], ["heads"]))
def test_the_surrounding_mesh_is_taken(layout: str) -> None:
    mesh, stack = mesh_of("data 2, context 2, tensor 2"), Stack.make()
    clean, noisy = clips(STREAM, 12, batch=2)
    want, _ = teacher_forward(stack, STREAM, clean, noisy)
    with jax.set_mesh(mesh):
        cache = stack.cache(STREAM, 2, context=layout)
        assert dict(cache.layout.mesh) == {"data": 2, "context": 2, "tensor": 2}
        made = rollout(stack, STREAM, cache, clean, noisy)
    close(made.clean, want)


@pytest.mark.parametrize("spread", [False, True])
def test_results_whose_weights_are_far_apart_are_merged(spread: bool) -> None:
    """For the first query one device has all the weight, for the second the other."""
    out = jnp.stack([jnp.ones((1, 2, 1, 4)), 2 * jnp.ones((1, 2, 1, 4))])
    lse = jnp.array([[[[0.0, 0.0]]], [[[300.0, -300.0]]]])
    whole, own = jax.P(), jax.P("context")
    merged = jax.shard_map(
        lambda out, lse: merged_over_devices(out[0], lse[0], spread),
        mesh=mesh_of("context 2"), in_specs=(own, own), check_vma=False,
        out_specs=jax.P(None, "context") if spread else whole,
    )  # fmt: skip
    close(jax.jit(merged)(out, lse)[0, :, 0, 0], [2.0, 1.0])


MOVES = re.compile(r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)\(")


def moves(layout: str, name: str = "context 4") -> list[tuple[str, str]]:
    """Compile a block with a full cache over 4 devices; return (kind, result) of each transfer."""
    mesh = mesh_of(name)
    stack, (clean, _) = Stack.make(mesh=mesh), clips(STREAM, 3)
    cache = skipped(stack.cache(STREAM, mesh=mesh, context=layout), times=3)
    assert cache.stage == "full"
    step = jax.jit(stack.step, donate_argnums=3)
    text = step.lower(clean, 0.0, table(STREAM, 3), cache).compile().as_text() or ""
    found = ((line, MOVES.search(line)) for line in text.splitlines())
    return [(move[1], line[: move.start()]) for line, move in found if move]


@pytest.mark.parametrize("name", but(["context 4", "context 2, tensor 2"], ["context 2, tensor 2"]))
def test_heads_travel_in_four_all_to_alls(name: str) -> None:
    """These are for queries, keys, values and output of the block.

    Cached keys do not move, and heads stay within a tensor rank.
    """
    kinds = [kind for kind, _ in moves("heads", name)]
    assert kinds.count("all-to-all") == 4 and "collective-permute" not in kinds


def test_by_tokens_queries_travel_and_not_what_is_kept() -> None:
    found = moves("tokens")
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce", "reduce-scatter"}
    window = STREAM.tokens_per_frame * (STREAM.budget or 0)
    assert not [result for _, result in found if f",{window}," in result or ",9," in result]


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
