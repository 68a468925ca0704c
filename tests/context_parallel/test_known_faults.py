"""Faults that other libraries had on a mesh (reference/maxdiffusion.md): padded keys that are
attended to, self-attention of SDXL and Flux within a shard alone, and masks that are not causal.
"""

from __future__ import annotations

from functools import cache, partial
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
def test_padded_keys_are_not_attended_to(strategy: str) -> None:
    """A padded key has score 0, which wins over real ones whose scores are strongly negative."""
    c = config(4, attention="dot_product", context_parallel=strategy)
    q, k, v = qkv(37, shift=1000.0)
    want = attention64(q, k, v).out
    got = jax.jit(partial(ma.attention, config=c, mesh=mesh_of(c)))(q, k, v)
    np.testing.assert_allclose(got, want, atol=2e-3)
    assert abs(float(jnp.abs(got).mean()) / np.abs(want).mean() - 1) < 1e-3


@pytest.mark.parametrize(
    ("strategy", "context"),
    [("auto", 2), ("ring", 4), pytest.param("all_gather", 4, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("heads", "dim_head", "tokens", "norm"),
    [(4, 64, 64, None), (4, 128, 16 + 64, "rms_norm")],
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


CAUSAL: list[dict[str, Any]] = [
    {"attention": "dot_product", "use_memory_efficient_attention": True},
    {"attention": "flash"},
    {"attention": "flash", "flash_min_seq_length": 4096},
    {"attention": "tokamax_flash"},
    {"attention": "cudnn", "fallback": "allow"},
    {"attention": "tokamax_ring"},  # it is a ring already
]


@pytest.mark.parametrize("settings", CAUSAL, ids=lambda x: "-".join(map(str, x.values())))
def test_a_causal_ring_is_causal(settings: dict[str, Any]) -> None:
    """A change of the last key and value reaches the last query alone."""
    if "tokamax" in settings["attention"]:
        pytest.importorskip("tokamax")
    named = {} if settings["attention"] == "tokamax_ring" else {"context_parallel": "ring"}
    c = config(2, **settings, **named)
    mesh = mesh_of(c)
    q, k, v = qkv(37, heads=2)
    run = jax.jit(lambda k, v: ma.attention(q, k, v, mask=M.Causal(), config=c, mesh=mesh))
    before, after = run(k, v), run(k.at[:, -1].add(3.0), v.at[:, -1].add(3.0))
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert float(jnp.abs(before[:, -1] - after[:, -1]).max()) > 0.01
