"""Attention on meshes of 8 CPU devices equals float64 on one, forward and gradients, at lengths
that do not divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import maxattn as ma
from maxattn.errors import MeshError, Unsupported
from maxattn.sharding import batch_sharding, place
from maxattn.tools.compile.hlo import transfers
from tests.cases import BIASES, KINDS, MASKS, judge, run_case
from tests.pairwise import pairwise, plainly
from tests.waiting import few

MESHES = {
    "fsdp 8": {"fsdp": 8},
    "context 2": {"data": 4, "context": 2},
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
FIXED = {"dtype": "float32", "head_dim": 16, "batch": 8}


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
    case = case | FIXED
    judge(case, run_case(case, config, config.make_mesh(), role=case["role"]))


# What the code of a strategy depends on; biases, meshes, heads and lengths meet every strategy, and
# each other only in test_all_pairs: tests/kernels pairs masks with biases.
CORE = ("strategy", "kernel", "mask")
# What gathers keys or heads sees positions as one device does: of these masks one kind is enough.
GATHERED_ALIKE = ("block window", "lengths", "not segments")
RUNNING = AXES | {"mask": list(KINDS), "strategy": [*STRATEGIES, "none"]}


def runs(case: dict) -> bool:
    """A strategy counts where it runs: in self-attention, over context. Rings of 8 compile for
    seconds: few masks meet them, and no chunks of blockwise.
    """
    spread = "context" in MESHES[case["mesh"]] and case["role"] == "self"
    if case["strategy"] == "none" and case["mask"] in ("block window", "lengths"):
        return False  # each device does what it does alone: ids and a table are cut
    few = case["kernel"] == "dense" and case["mask"] in ("causal", "segments", "window | sink")
    rings = "ring" in case["strategy"] and not few
    if case["strategy"] in ("all_gather", "ulysses") and case["mask"] in GATHERED_ALIKE:
        return False
    return spread == (case["strategy"] != "none") and not (rings and case["mesh"] == "context 8")


# A longer search finds fewer cases for the same pairs. Chunks compile twice as long.
PAIRS = pairwise(RUNNING, runs, core=CORE, tries=300)
PAIRS = plainly(PAIRS, "kernel", "dense", runs, CORE)
# A ring meets every mask; what gathers keys or heads sees positions as one device does.
RINGS = AXES | {
    "mask": [m for m in MASKS if m not in KINDS],
    "strategy": ["ring"],
    "bias": ["none"],
}
RING_CORE = ("strategy", "kernel")
PAIRS += plainly(pairwise(RINGS, runs, core=RING_CORE), "kernel", "dense", runs, RING_CORE)


# Every strategy meets every mesh and kernel, and every mask a mesh; biases meet each strategy in
# tests/kernels/test_bias_level.py. What is cut by a strategy is cut alike for the rest.
@pytest.mark.parametrize("case", few(PAIRS, ("strategy", "mesh"), ("strategy", "kernel")), ids=name)
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
    """A module's training step at 61 tokens over 8 devices: the ring's sends and one sum of the
    gradients, no more.
    """
    config = ma.AttentionConfig(attention="ring", ici_data_parallelism=1, ici_context_parallelism=8)
    mesh = config.make_mesh()
    module = ma.FlaxAttention(
        query_dim=64, heads=4, dim_head=16, config=config, mesh=mesh, rngs=nnx.Rngs(0)
    )
    place(module, mesh)
    graph, state = nnx.split(module)
    x = jax.device_put(jnp.ones((2, 61, 64)), batch_sharding(mesh, 3))
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
        text = str(jax.make_jaxpr(lambda *x: ma.attention(*x, config=config))(q, k, v))
        out = jax.jit(lambda *x: ma.attention(*x, config=config))(q, k, v)
        grad = jax.jit(jax.grad(lambda *x: (ma.attention(*x, config=config) ** 2).sum()))(q, k, v)
    assert "all_gather[" in text
    assert jnp.allclose(out, ma.attention(q, k, v), atol=1e-5)
    assert jnp.allclose(
        grad, jax.grad(lambda *x: (ma.attention(*x) ** 2).sum())(q, k, v), atol=1e-4
    )


def test_a_mesh_axis_that_does_not_exist_is_named() -> None:
    with pytest.raises(MeshError, match=r"mesh: contxt\n.*\n.*did you mean 'context'"):
        ma.plan(ma.Call.of(*qkv()[:2]), mesh={"contxt": 2})
