"""Attention on meshes of 8 CPU devices against float64, forward and gradients, at lengths that do
not divide.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import MeshError, Unsupported
from maxattn.sharding import batch_sharding, place
from maxattn.tools.compile.hlo import transfers
from tests.cases import BIASES, MASKS, judge, run_case
from tests.pairwise import name_of, pairwise
from tests.reference import attention64
from tests.waiting import but

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
        "attention": "dot_product", "use_memory_efficient_attention": True,
        "query_chunk_size": 8, "key_chunk_size": 24,
    },
}  # fmt: skip
STRATEGIES = ["all_gather", "ring", "ulysses", "ulysses_ring"]
IN_GROUPS = "ulysses_ring in groups of heads"
AXES = {
    "mesh": list(MESHES),
    "strategy": [*STRATEGIES, IN_GROUPS],
    "kernel": list(KERNELS),
    "mask": list(MASKS),
    "heads": ["8 of 8", "8 of 2", "8 of 1"],
    "length": ["odd", "64", "cross", "short", "one"],
    "bias": list(BIASES),
    "role": ["self", "cross"],
}
FIXED = {"dtype": "float32", "head_dim": 16}


def make_config(case: dict) -> ma.AttentionConfig:
    axes = {"data": 1} | MESHES[case["mesh"]]
    sizes = {f"ici_{axis}_parallelism": size for axis, size in axes.items()}
    kernel = dict(KERNELS[case["kernel"]])
    if case["role"] == "cross":
        kernel["cross_attention"] = kernel.pop("attention")
    unnamed = case["role"] == "cross" or case["strategy"] == "none"
    strategy = {} if unnamed else {"context_parallel": case["strategy"].split()[0]}
    if not unnamed and case["strategy"] == IN_GROUPS:
        strategy |= {"ulysses_shards": 2, "ulysses_attention_chunks": 2}
    return ma.AttentionConfig(**sizes, **kernel, **strategy)


# In `make test` every strategy, mesh, length and bias runs once: tests/kernels pairs masks with
# biases. A ring runs with the masks that it cuts.
SMALL = (
    ("context 8", "ring", "dense", "window", "8 of 8", "odd", "none", "self"),
    ("context 2", "ring", "blockwise", "lengths", "8 of 1", "one", "shared", "self"),
    ("all", "ring", "dense", "video", "8 of 8", "64", "full", "self"),
    ("context 4", "ulysses_ring", "dense", "causal", "8 of 8", "odd", "keys", "self"),
    ("context 8", "ulysses", "dense", "segments", "8 of 1", "cross", "full", "self"),
    ("context 4", IN_GROUPS, "blockwise", "dense heads", "8 of 8", "one", "keys", "self"),
    ("context 2", "all_gather", "blockwise", "window | sink", "8 of 2", "cross", "shared", "self"),
    ("all", "all_gather", "dense", "not segments", "8 of 1", "short", "far", "self"),
    ("tensor 4", "none", "dense", "dense heads", "8 of 2", "short", "full", "self"),
    ("fsdp 8", "none", "blockwise", "full", "8 of 8", "odd", "none", "self"),
    ("context 8", "none", "dense", "lengths", "8 of 2", "cross", "keys", "cross"),
    ("all", "none", "blockwise", "rows empty", "8 of 1", "odd", "none", "cross"),
)


CASES = [dict(zip(AXES, row, strict=True)) for row in SMALL]


@pytest.mark.parametrize(
    "case", but([*CASES, *pairwise(AXES, lambda case: True)], CASES), ids=name_of
)
def test_pairs(case: dict) -> None:
    config, sizes = make_config(case), MESHES[case["mesh"]]
    case = case | FIXED | {"batch": 8 if "data" in sizes or "fsdp" in sizes else 2}
    mesh = config.make_mesh(jax.devices()[: prod(sizes.values())])
    judge(case, run_case(case, config, mesh, role=case["role"]))


def qkv(batch: int = 8, heads: int = 4, length: int = 37) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (batch, length, heads, 16)) for key in keys)
    return q, k, v


def over(context: int, **more: Any) -> tuple[ma.AttentionConfig, jax.sharding.Mesh]:
    sizes = {"ici_data_parallelism": 1, "ici_context_parallelism": context}
    config = ma.AttentionConfig(**sizes | more)
    return config, config.make_mesh(jax.devices()[:context])


@pytest.mark.parametrize(
    ("mesh", "sizes", "message"),
    [
        (
            {"data": 2, "fsdp": 4}, {"batch": 3},
            r"batch: 3\n.*multiple of 8.*data=2 x fsdp=4\n.*batch of 8",
        ),
        ({"tensor": 4}, {"heads": 6}, r"heads: 6\n.*tensor=4\n.*1, 2, 3, 6"),
        ({"contxt": 2}, {}, r"mesh: contxt\n.*\n.*did you mean 'context'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_mesh_is_refused(
    mesh: dict[str, int], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(MeshError, match=message):
        ma.plan(ma.Call.of(*qkv(**sizes)[:2]), mesh=mesh)


def test_heads_over_context_as_attention_sharding_uniform_false_asks() -> None:
    """Ulysses is chosen, unless a strategy is named; heads that do not divide are refused."""
    config, mesh = over(8, attention_sharding_uniform=False)
    q, k, v = qkv(heads=8)
    out = ma.attention(q, k, v, config=config, mesh=mesh)
    assert jnp.allclose(out, ma.attention(q, k, v), atol=1e-5)
    plan = ma.plan(ma.Call.of(q, k), config, mesh)
    assert (plan.strategy.name, plan.kernel.name) == ("ulysses", "dot_product")
    named = ma.plan(ma.Call.of(q, k), config.replace(context_parallel="ring"), mesh)
    assert named.strategy.name == "ring"
    assert any("attention_sharding_uniform has no effect" in note for note in named.notes)
    refused = r"attention_sharding_uniform: False\n.*6 query heads.*multiple of 8"
    with pytest.raises(Unsupported, match=refused):
        ma.attention(*qkv(heads=6), config=config.replace(fallback="error"), mesh=mesh)


def text_of_gradients(config: ma.AttentionConfig, mesh: Any, *qkv: Any, **how: Any) -> str:
    def loss(*x: Any) -> jax.Array:
        return ma.attention(*x, config=config, mesh=mesh, **how).sum()

    return str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*qkv))


def test_replicated_keys_of_cross_attention_are_summed_once() -> None:
    q, k, v = qkv()
    text = text_of_gradients(*over(8), q, k[:, :5], v[:, :5], role="cross")
    assert text.count("psum") == 2 and "all_gather[" not in text


def test_a_length_that_does_not_divide_is_not_gathered_around_attention() -> None:
    """The program of 61 tokens over 4 devices has only the ring's sends and a sum of gradients."""
    config, mesh = over(4, attention="ring")
    sizes = {"query_dim": 16, "heads": 2, "dim_head": 8}
    module = ma.FlaxAttention(config=config, mesh=mesh, rngs=nnx.Rngs(0), **sizes)
    place(module, mesh)
    graph, state = nnx.split(module)
    x = jax.device_put(jnp.ones((2, 61, 16)), batch_sharding(mesh, 3))
    step = jax.jit(jax.grad(lambda state, x: (nnx.merge(graph, state)(x) ** 2).sum()))
    found = {t.kind for t in transfers(step.lower(state, x).compile().as_text())}
    assert found == {"ppermute", "psum"}


@pytest.mark.parametrize(
    "enter", [jax.set_mesh, lambda mesh: mesh], ids=["jax.set_mesh(mesh)", "with mesh:"]
)
def test_the_surrounding_mesh_is_used_when_none_is_given(enter: Any) -> None:
    config, mesh = over(8, context_parallel="all_gather", attention="dot_product")
    x = qkv()
    with enter(mesh):
        step = jax.jit(lambda *x: ma.attention(*x, config=config)).trace(*x)
        out = step.lower().compile()(*x)
    assert "all_gather[" in str(step.jaxpr)
    assert jnp.allclose(out, ma.attention(*x), atol=1e-5)


# ---- faults that other libraries had on a mesh (reference/maxdiffusion.md) -----------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padded_keys_are_not_attended_to(strategy: str) -> None:
    """A padded key has score 0, which wins over real ones whose scores are strongly negative."""
    config, mesh = over(4, attention="dot_product", context_parallel=strategy)
    q, k, v = qkv(batch=1)
    # Queries and keys that point away from each other: every score is about -1000.
    away = jnp.zeros(16).at[0].set(4000.0**0.5)
    want = attention64(q + away, k - away, v).out
    got = jax.jit(partial(ma.attention, config=config, mesh=mesh))(q + away, k - away, v)
    assert jnp.allclose(got, want, atol=2e-3)
    assert abs(float(jnp.abs(got).mean()) / np.abs(want).mean() - 1) < 1e-3


CAUSAL: list[dict[str, Any]] = [
    {"attention": "flash"},
    {"attention": "flash", "flash_min_seq_length": 4096},
    {"attention": "cudnn", "fallback": "allow"},
    {"attention": "tokamax_ring", "context_parallel": "auto"},  # it is a ring already
]


@pytest.mark.parametrize(
    "settings", but(CAUSAL, CAUSAL[::3]), ids=lambda x: "-".join(map(str, x.values()))
)
def test_a_causal_ring_is_causal(settings: dict[str, Any]) -> None:
    """A change of the last key and value reaches the last query alone."""
    if "tokamax" in settings["attention"]:
        pytest.importorskip("tokamax")
    config, mesh = over(2, **{"context_parallel": "ring"} | settings)
    q, k, v = qkv(batch=1, heads=2)
    run = jax.jit(lambda k, v: ma.attention(q, k, v, mask=M.Causal(), config=config, mesh=mesh))
    before, after = run(k, v), run(k.at[:, -1].add(3.0), v.at[:, -1].add(3.0))
    assert jnp.array_equal(before[:, :-1], after[:, :-1])
    assert float(jnp.abs(before[:, -1] - after[:, -1]).max()) > 0.01
