"""Faults that other libraries had on meshes (reference/maxdiffusion.md).

These are padded keys that get attention, and causal masks that are not causal.
test_wan_on_meshes.py tests that attention is within a shard.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from tests.reference import attention64
from tests.waiting import but

STRATEGIES = ["all_gather", "ring", "ulysses", "ulysses_ring"]


def config(context: int, **more: Any) -> ma.AttentionConfig:
    return ma.AttentionConfig(ici_data_parallelism=1, ici_context_parallelism=context, **more)


def mesh_of(c: ma.AttentionConfig) -> jax.sharding.Mesh:
    return c.make_mesh(jax.devices()[: c.ici_context_parallelism])


def qkv(heads: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(3), 3)
    q, k, v = (jax.random.normal(key, (1, 37, heads, 16)) for key in keys)
    return q, k, v


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padded_keys_are_not_attended_to(strategy: str) -> None:
    """A padded key has score 0, which is the largest if the real scores are strongly negative."""
    c = config(4, attention="dot_product", context_parallel=strategy)
    q, k, v = qkv(heads=4)
    # Queries and keys that point away from each other: every score is about -1000.
    away = jnp.zeros(16).at[0].set(4000.0**0.5)
    q, k = q + away, k - away
    want = attention64(q, k, v).out
    got = jax.jit(partial(ma.attention, config=c, mesh=mesh_of(c)))(q, k, v)
    np.testing.assert_allclose(got, want, atol=2e-3)
    assert abs(float(jnp.abs(got).mean()) / np.abs(want).mean() - 1) < 1e-3


CAUSAL: list[dict[str, Any]] = [
    {"attention": "dot_product", "use_memory_efficient_attention": True},
    {"attention": "flash"},
    {"attention": "flash", "flash_min_seq_length": 4096},
    {"attention": "tokamax_flash"},
    {"attention": "cudnn", "fallback": "allow"},
    {"attention": "tokamax_ring"},  # it is a ring already
]


@pytest.mark.parametrize(
    "settings", but(CAUSAL, CAUSAL[1::2]), ids=lambda x: "-".join(map(str, x.values()))
)
def test_a_causal_ring_is_causal(settings: dict[str, Any]) -> None:
    """A change of the last key and value must change only the last query's result."""
    if "tokamax" in settings["attention"]:
        pytest.importorskip("tokamax")
    named = {} if settings["attention"] == "tokamax_ring" else {"context_parallel": "ring"}
    c = config(2, **settings, **named)
    mesh = mesh_of(c)
    q, k, v = qkv(heads=2)
    run = jax.jit(lambda k, v: ma.attention(q, k, v, mask=M.Causal(), config=c, mesh=mesh))
    before, after = run(k, v), run(k.at[:, -1].add(3.0), v.at[:, -1].add(3.0))
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert float(jnp.abs(before[:, -1] - after[:, -1]).max()) > 0.01
