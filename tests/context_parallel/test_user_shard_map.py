"""Attention on local arrays inside a user's `shard_map`, with and without checks of axes."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import maxattn as ma
from maxattn import masks as M
from tests.cases import XLA_KERNELS
from tests.waiting import few


def operands() -> tuple[jax.Array, ...]:
    """Make q, and k, v and a bias that every device shares."""
    keys = jax.random.split(jax.random.key(4), 4)
    shapes = ((4, 12, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16), (1, 4, 12, 12))
    q, k, v, bias = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return q, k, v, bias


LEFT = "context is left to us"
AXES = {LEFT: {"data"}, "all are the user's": {"data", "context"}}
KERNELS = XLA_KERNELS | {"flash": ma.AttentionConfig(attention="flash")}
WAYS = [
    {"kernel": kernel, "axes": axes, "checked": checked}
    for kernel, axes, checked in product(KERNELS, AXES, (True, False))
    # Flash refuses a checked shard_map over all axes, and takes no bias.
    if kernel in XLA_KERNELS or axes == LEFT or not checked
]


# Each way to map, checked and not.
@pytest.mark.parametrize("way", few(WAYS, ("axes", "checked")))
def test_forward_and_gradients(way: dict[str, Any]) -> None:
    mesh = ma.AttentionConfig(ici_data_parallelism=2, ici_context_parallelism=4).make_mesh()
    config, checked, is_xla = KERNELS[way["kernel"]], way["checked"], way["kernel"] in XLA_KERNELS
    spec, whole = PartitionSpec("data"), PartitionSpec()
    # Unchecked, jax does not sum the gradient of a shared operand: there each device has its own.
    tile = (lambda x: x) if checked else (lambda x: jnp.concatenate([x, x]))
    shared = whole if checked else spec
    mapped = jax.shard_map(
        lambda q, k, v, bias: ma.attention(q, k, v, M.Causal(), bias, config=config, mesh=mesh),
        mesh=mesh, in_specs=(spec, shared, shared, whole), out_specs=spec,
        axis_names=AXES[way["axes"]], check_vma=checked,
    )  # fmt: skip
    q, k, v, bias = operands()

    def loss(q, k, v):
        return (mapped(q, tile(k), tile(v), bias if is_xla else None) ** 2).sum()

    got, want = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v), without_a_mesh(is_xla)
    assert jnp.allclose(got[0], want[0], rtol=1e-5)
    assert all(jnp.allclose(g, w, atol=2e-5) for g, w in zip(got[1], want[1], strict=True))


@cache
def without_a_mesh(biased: bool) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Compute the loss and its gradients for two copies of k and v."""
    q, k, v, bias = operands()
    bias = bias if biased else None

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1, 2))
    def loss(q, k, v):
        k, v = (jnp.concatenate([x, x]) for x in (k, v))
        out = ma.attention(q, k, v, mask=M.Causal(), bias=bias, config=XLA_KERNELS["dense"])
        return (out**2).sum()

    return loss(q, k, v)
