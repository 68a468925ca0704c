"""Attention on meshes of 8 CPU devices against float64, forward and gradients, at lengths that do
not divide.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import maxattn as ma
from maxattn.errors import MeshError, Unsupported
from maxattn.sharding import batch_sharding, place
from maxattn.tools.compile.hlo import transfers
from tests.cases import BIASES, MASKS, judge, run_case
from tests.pairwise import pairwise

MESHES = {
    "fsdp 8": {"fsdp": 8},
    "context 2": {"context": 2},
    "context 4": {"data": 2, "context": 4},
    "context 8": {"context": 8},
    "all": {"fsdp": 2, "context": 2, "tensor": 2},
    "tensor 4": {"data": 2, "tensor": 4},
}
KERNELS = {
    "dense": {"attention": "dot_product"},
    "blockwise": {
        "attention": "dot_product",
        "use_memory_efficient_attention": True,
        "query_chunk_size": 8,
        "key_chunk_size": 24,
    },
}
STRATEGIES = ["all_gather", "ring", "ulysses", "ulysses_ring"]
AXES = {
    "mesh": list(MESHES),
    "strategy": STRATEGIES,
    "kernel": list(KERNELS),
    "mask": list(MASKS),
    "heads": ["8 of 8", "8 of 2", "8 of 1"],
    "length": ["odd", "64", "cross", "short", "one"],
    "bias": list(BIASES),
    "role": ["self", "cross"],
}
FIXED = {"dtype": "float32", "head_dim": 16}


def name(case: dict) -> str:
    return "-".join(str(v).replace(" ", "_") for v in case.values())


def make_config(case: dict) -> ma.AttentionConfig:
    sizes = {
        f"ici_{axis}_parallelism": size
        for axis, size in ({"data": 1} | MESHES[case["mesh"]]).items()
    }
    kernel = KERNELS[case["kernel"]]
    if case["role"] == "cross":
        kernel = {k: v for k, v in kernel.items() if k != "attention"} | {
            "cross_attention": "dot_product"
        }
    unnamed = case["role"] == "cross" or case["strategy"] == "none"
    strategy = {} if unnamed else {"context_parallel": case["strategy"]}
    return ma.AttentionConfig(**sizes, **kernel, **strategy)


def check(case: dict) -> None:
    config = make_config(case)
    sizes = MESHES[case["mesh"]]
    case = case | FIXED | {"batch": 8 if "data" in sizes or "fsdp" in sizes else 2}
    mesh = config.make_mesh(jax.devices()[: prod(sizes.values())])
    judge(case, run_case(case, config, mesh, role=case["role"]))


# In `make test` every strategy runs with both kernels, and every mesh, mask, length and bias runs
# once: tests/kernels pairs masks with biases. A ring meets the masks that it cuts; what gathers
# keys or heads sees positions as one device does.
SMALL = (
    ("context 8", "ring", "dense", "window", "8 of 8", "odd", "none", "self"),
    ("context 2", "ring", "blockwise", "causal & lengths", "8 of 8", "short", "none", "self"),
    ("context 4", "ring", "dense", "flags", "8 of 2", "cross", "keys", "self"),
    ("context 2", "ring", "dense", "lengths", "8 of 1", "one", "shared", "self"),
    ("all", "ring", "dense", "video", "8 of 8", "64", "full", "self"),
    ("context 2", "ring", "dense", "dense", "8 of 2", "64", "none", "self"),
    ("context 2", "ring", "dense", "block causal", "8 of 2", "odd", "none", "self"),
    ("context 2", "ring", "dense", "packed", "8 of 1", "short", "none", "self"),
    ("context 2", "ring", "dense", "nothing", "8 of 2", "odd", "keys", "self"),
    ("context 4", "ulysses_ring", "dense", "causal", "8 of 8", "odd", "keys", "self"),
    ("context 4", "ulysses_ring", "blockwise", "block window", "8 of 1", "short", "far", "self"),
    ("context 8", "ulysses", "dense", "segments", "8 of 1", "cross", "full", "self"),
    ("context 2", "ulysses", "blockwise", "dense heads", "8 of 2", "one", "keys", "self"),
    ("context 2", "all_gather", "blockwise", "window | sink", "8 of 2", "cross", "shared", "self"),
    ("all", "all_gather", "dense", "not segments", "8 of 1", "short", "far", "self"),
    ("tensor 4", "none", "dense", "dense heads", "8 of 2", "short", "full", "self"),
    ("fsdp 8", "none", "blockwise", "full", "8 of 8", "odd", "none", "self"),
    ("context 8", "none", "dense", "lengths", "8 of 2", "cross", "keys", "cross"),
    ("all", "none", "blockwise", "rows empty", "8 of 1", "odd", "none", "cross"),
)


@pytest.mark.parametrize("case", [dict(zip(AXES, row, strict=True)) for row in SMALL], ids=name)
def test_pairs(case: dict) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(AXES, lambda case: True), ids=name)
def test_all_pairs(case: dict) -> None:
    check(case)


def qkv(batch: int = 8, heads: int = 4, length: int = 37) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (batch, length, heads, 16)) for key in keys)
    return q, k, v


REFUSED: dict[str, tuple[dict[str, int], dict[str, int], str]] = {
    "batch": (
        {"data": 2, "fsdp": 4}, {"batch": 3},
        r"batch: 3\n.*multiple of 8.*data=2 x fsdp=4\n.*batch of 8",
    ),
    "heads": ({"tensor": 4}, {"heads": 6}, r"heads: 6\n.*tensor=4\n.*1, 2, 3, 6"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_divide_is_refused(name: str) -> None:
    axes, sizes, message = REFUSED[name]
    config = ma.AttentionConfig(**{f"ici_{a}_parallelism": n for a, n in axes.items()})  # type: ignore[arg-type]
    with pytest.raises(MeshError, match=message):
        ma.attention(*qkv(**sizes), mesh=config.make_mesh())


def test_heads_over_context_as_attention_sharding_uniform_false_asks() -> None:
    """Ulysses runs, equal to one device; a strategy that is named wins; heads that do not divide
    are refused.
    """
    config = ma.AttentionConfig(
        attention_sharding_uniform=False, ici_data_parallelism=1, ici_context_parallelism=8
    )
    mesh, (q, k, v) = config.make_mesh(), qkv(heads=8)
    out = ma.attention(q, k, v, config=config, mesh=mesh)
    assert jnp.allclose(out, ma.attention(q, k, v), atol=1e-5)
    plan = ma.plan(ma.Call.of(q, k), config, mesh)
    assert (plan.strategy.name, plan.kernel.name) == ("ulysses", "dot_product")
    named = ma.plan(ma.Call.of(q, k), config.replace(context_parallel="ring"), mesh)
    assert named.strategy.name == "ring"
    assert any("attention_sharding_uniform has no effect" in note for note in named.notes)
    with pytest.raises(
        Unsupported, match=r"attention_sharding_uniform: False\n.*6 heads.*multiple of 8"
    ):
        ma.attention(*qkv(heads=6), config=config.replace(fallback="error"), mesh=mesh)


def test_collectives_of_the_plan_are_those_of_the_program() -> None:
    config = ma.AttentionConfig(
        ici_data_parallelism=1,
        ici_context_parallelism=8,
        attention="dot_product",
        context_parallel="all_gather",
    )
    mesh, (q, k, v) = config.make_mesh(), qkv()

    def loss(q, k, v):
        return ma.attention(q, k, v, config=config, mesh=mesh).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v))
    named = ma.plan(ma.Call.of(q, k), config, mesh).collectives
    assert [c.kind for c in named] == ["all_gather", "all_gather", "psum_scatter"]
    # K and V each: gathered forward and backward, their gradients scattered once.
    assert text.count("all_gather[") == 4
    assert text.count("reduce_scatter[") == 2
    assert "psum" not in text
    assert "ppermute" not in text


def test_replicated_keys_of_cross_attention_are_summed_once() -> None:
    config = ma.AttentionConfig(ici_data_parallelism=1, ici_context_parallelism=8)
    mesh, (q, k, v) = config.make_mesh(), qkv()
    k, v = k[:, :5], v[:, :5]

    def loss(q, k, v):
        return (ma.attention(q, k, v, config=config, mesh=mesh, role="cross") ** 2).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v))
    assert text.count("psum") == 2
    assert "all_gather[" not in text


def test_a_length_that_does_not_divide_is_not_gathered_around_attention() -> None:
    """A module's training step at 61 tokens over 4 devices has the ring's sends and one sum of the
    gradients.
    """
    config = ma.AttentionConfig(attention="ring", ici_data_parallelism=1, ici_context_parallelism=4)
    mesh = config.make_mesh(jax.devices()[:4])
    module = ma.FlaxAttention(
        query_dim=16, heads=2, dim_head=8, config=config, mesh=mesh, rngs=nnx.Rngs(0)
    )
    place(module, mesh)
    graph, state = nnx.split(module)
    x = jax.device_put(jnp.ones((2, 61, 16)), batch_sharding(mesh, 3))
    step = jax.jit(jax.grad(lambda state, x: (nnx.merge(graph, state)(x) ** 2).sum()))
    found = {t.kind for t in transfers(step.lower(state, x).compile().as_text())}
    assert found == {"ppermute", "psum"}


@pytest.mark.parametrize(
    "enter", [jax.set_mesh, lambda mesh: mesh], ids=["jax.set_mesh(mesh)", "with mesh:"]
)
def test_the_surrounding_mesh_is_used_when_none_is_given(
    enter: Callable[[jax.sharding.Mesh], Any],
) -> None:
    config = ma.AttentionConfig(
        ici_data_parallelism=1,
        ici_context_parallelism=8,
        context_parallel="all_gather",
        attention="dot_product",
    )
    q, k, v = qkv()
    with enter(config.make_mesh()):
        run = jax.jit(jax.grad(lambda *x: (ma.attention(*x, config=config) ** 2).sum())).trace(
            q, k, v
        )
        grad = run.lower().compile()(q, k, v)
    assert "all_gather[" in str(run.jaxpr)
    want = jax.jit(jax.grad(lambda *x: (ma.attention(*x) ** 2).sum()))(q, k, v)
    assert jnp.allclose(grad, want, atol=1e-4)


def test_a_mesh_axis_that_does_not_exist_is_named() -> None:
    with pytest.raises(MeshError, match=r"mesh: contxt\n.*\n.*did you mean 'context'"):
        ma.plan(ma.Call.of(*qkv()[:2]), mesh={"contxt": 2})
