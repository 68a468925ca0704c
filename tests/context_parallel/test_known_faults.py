"""Faults that other libraries had on a mesh (reference/maxdiffusion.md), as tests that maxattn
passes.

Padded keys that are attended to, self-attention of SDXL and Flux that stays within a shard, and
causality that is lost on the way.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import masks as M
from maxattn.sharding import place
from tests.reference import attention64

STRATEGIES = ["all_gather", "ring", "ulysses", "ulysses_ring"]


def config(context: int, **more: Any) -> ma.AttentionConfig:
    return ma.AttentionConfig(ici_data_parallelism=1, ici_context_parallelism=context, **more)


def mesh_of(c: ma.AttentionConfig) -> jax.sharding.Mesh:
    return c.make_mesh(jax.devices()[: c.ici_context_parallelism])


def qkv(length: int, heads: int = 4, shift: float = 0.0) -> tuple[jax.Array, ...]:
    q, k, v = (
        jax.random.normal(key, (1, length, heads, 16))
        for key in jax.random.split(jax.random.key(3), 3)
    )
    # Queries and keys that point away from each other: every score is about -shift.
    direction = jnp.zeros(16).at[0].set(shift**0.5 * 2)
    return q + direction, k - direction, v


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("length", [255])
@pytest.mark.parametrize("shift", [0.0, 1000.0], ids=["scores about 0", "scores about -1000"])
def test_padded_keys_are_not_attended_to(strategy: str, length: int, shift: float) -> None:
    """A padded key has score 0, which wins over all real ones where those are strongly negative."""
    c = config(4, attention="dot_product", context_parallel=strategy)
    q, k, v = qkv(length, shift=shift)
    want = attention64(q, k, v).out
    got = ma.attention(q, k, v, config=c, mesh=mesh_of(c))
    np.testing.assert_allclose(got, want, atol=2e-5 if shift == 0 else 2e-3)
    assert abs(float(jnp.abs(got).mean()) / np.abs(want).mean() - 1) < 1e-3


@pytest.mark.parametrize(
    ("strategy", "context"),
    [
        *((strategy, 2) for strategy in ("auto", "all_gather")),
        ("ring", 4),
        pytest.param("ring", 2, marks=pytest.mark.slow),
        *(pytest.param(strategy, 4, marks=pytest.mark.slow) for strategy in ("auto", "all_gather")),
    ],
)
@pytest.mark.parametrize(
    ("heads", "dim_head", "tokens", "norm"),
    [(4, 64, 256, None), (4, 128, 64 + 256, "rms_norm")],
    ids=["SDXL: H=64, no norm", "Flux: text and image in one sequence, H=128, norm per head"],
)
def test_self_attention_sees_all_shards(
    context: int, strategy: str, heads: int, dim_head: int, tokens: int, norm: str | None
) -> None:
    c = config(context, context_parallel=strategy)
    mesh = mesh_of(c)
    x, want = on_one_device(heads, dim_head, tokens, norm)
    spread = module(heads, dim_head, norm, c, mesh)
    place(spread, mesh)
    np.testing.assert_allclose(run(spread, x), want, atol=2e-5 * float(jnp.abs(want).max()))
    # Attention within a shard alone is something else: the test can tell.
    one = module(heads, dim_head, norm, ma.AttentionConfig(), None)
    shards = [run(one, part) for part in jnp.split(x, context, axis=1)]
    assert float(jnp.abs(jnp.concatenate(shards, axis=1) - want).max()) > 0.01 * float(
        jnp.abs(want).max()
    )


def module(
    heads: int, dim_head: int, norm: str | None, c: ma.AttentionConfig, mesh: Any
) -> ma.FlaxAttention:
    return ma.FlaxAttention(
        query_dim=heads * dim_head,
        heads=heads,
        dim_head=dim_head,
        qk_norm=norm,
        config=c,
        mesh=mesh,
        rngs=nnx.Rngs(0),
    )


@nnx.jit
def run(module: ma.FlaxAttention, x: jax.Array) -> jax.Array:
    return module(x)


@cache
def on_one_device(
    heads: int, dim_head: int, tokens: int, norm: str | None
) -> tuple[jax.Array, jax.Array]:
    """Return an input, and what a module without a mesh makes of it."""
    x = jax.random.normal(jax.random.key(1), (2, tokens, heads * dim_head))
    return x, run(module(heads, dim_head, norm, ma.AttentionConfig(), None), x)


SETTINGS: list[dict[str, Any]] = [
    {"attention": "dot_product"},
    {"attention": "dot_product", "use_memory_efficient_attention": True},
    {"attention": "flash"},
    {"attention": "flash", "flash_min_seq_length": 4096},
    {"attention": "tokamax_flash"},
    {"attention": "cudnn", "fallback": "allow"},
]
# Where its kernel cannot run dense does, which has a row of its own.
INSTEAD = (SETTINGS[3], SETTINGS[5])
CAUSAL = [
    *(
        pytest.param(*x, marks=pytest.mark.slow if x[0] and x[1] in INSTEAD else ())
        for x in product([None, "ring", "all_gather"], SETTINGS)
    ),
    *product([None, "ring"], [{"attention": "tokamax_ring"}]),  # it is a ring already
]


@pytest.mark.parametrize(
    ("strategy", "settings"),
    CAUSAL,
    ids=lambda x: "-".join(map(str, x.values() if isinstance(x, dict) else [x])),
)
def test_causality_is_kept_everywhere(strategy: str | None, settings: dict[str, Any]) -> None:
    """A change of the last key and value reaches the last query alone."""
    if "tokamax" in settings["attention"]:
        pytest.importorskip("tokamax")
    named = (
        {}
        if strategy is None or settings["attention"] == "tokamax_ring"
        else {"context_parallel": strategy}
    )
    c = config(1 if strategy is None else 2, **settings, **named)
    mesh = mesh_of(c)
    q, k, v = qkv(37, heads=2)
    run = jax.jit(lambda k, v: ma.attention(q, k, v, mask=M.Causal(), config=c, mesh=mesh))
    before, after = run(k, v), run(k.at[:, -1].add(3.0), v.at[:, -1].add(3.0))
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert float(jnp.abs(before[:, -1] - after[:, -1]).max()) > 0.01
    np.testing.assert_allclose(before, attention64(q, k, v, np.tri(37, dtype=bool)).out, atol=2e-5)
