"""A rollout on a mesh equals one on one device, with heads or tokens of the cache over context."""

from __future__ import annotations

import re
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import pytest

import maxattn as ma
from maxattn.sharding import batch_sharding
from maxattn.streaming.attend import merged_over_devices
from tests.streaming.stack import (
    HEADS,
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
