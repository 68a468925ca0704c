"""Calls of plain kernels work without jax's private modules, which any release may change."""

from __future__ import annotations

import builtins
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import maxattn as ma

X = jax.random.normal(jax.random.key(0), (2, 8, 2, 4))
CONFIGS = {
    "dense": ma.AttentionConfig(attention="dot_product"),
    "blockwise": ma.AttentionConfig(
        use_memory_efficient_attention=True, query_chunk_size=4, key_chunk_size=4
    ),
}


@pytest.fixture
def nothing_private(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fail every import of `jax._src` in maxattn, and return the imports that were tried."""
    there, asked = builtins.__import__, []

    def refuse(name: str, globals: Any = None, *others: Any, **named: Any) -> Any:
        if name.startswith("jax._src") and (globals or {}).get("__name__", "")[:7] == "maxattn":
            asked.append(name)
            raise ImportError(name)
        return there(name, globals, *others, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    return asked


def loss(x: jax.Array, config: ma.AttentionConfig, mesh: Any = None) -> jax.Array:
    return jnp.sum(jnp.sin(ma.attention(x, x, x, ma.masks.Causal(), config=config, mesh=mesh)))


@pytest.mark.parametrize("name", CONFIGS)
def test_plain_kernels_run_without(name: str, nothing_private: list[str]) -> None:
    config = CONFIGS[name]
    got = jax.jit(jax.grad(lambda x: loss(x, config)))(X)
    assert nothing_private, "it is asked for"
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    on_two = jax.grad(lambda x: loss(x, config, mesh))(X)
    np.testing.assert_allclose(on_two, got, atol=1e-5)


def test_explicit_meshes_work_without(nothing_private: list[str]) -> None:
    config = CONFIGS["dense"]
    want = jax.grad(lambda x: loss(x, config))(X)
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])):
        x = jax.device_put(X, jax.P("data"))
        got = jax.jit(jax.grad(lambda x: loss(x, config)))(x)
    assert len(nothing_private) > 1
    np.testing.assert_allclose(got, want, atol=1e-5)
