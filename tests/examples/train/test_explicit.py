"""Training on Explicit meshes, as `jax.make_mesh` makes them, equals one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.digits.settings import Settings
from maxattn_examples.digits.task import ClipTask
from maxattn_examples.digits.words import TORUS

from maxattn import sharding


def loss_and_gradients(settings: Settings, mesh: Any) -> Any:
    """Compute the loss and gradients of a model without parameters that are zero."""
    task, mesh = ClipTask.of(settings), sharding.program_mesh(mesh)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = task.build(mesh, nnx.Rngs(0))
    graph, params = nnx.split(model)
    rng = np.random.default_rng(1)
    filled = (
        np.asarray(x) + rng.normal(size=x.shape).astype("f") / 4 for x in jax.tree.leaves(params)
    )
    params = jax.device_put(jax.tree.unflatten(jax.tree.structure(params), filled), everywhere)
    examples = {
        "mixed": jax.random.normal(jax.random.key(2), (8, 3, 4, 4, 9)),
        "times": np.linspace(0.1, 1.0, 8, dtype=np.float32),
        "velocity": jax.random.normal(jax.random.key(3), (8, 3, 4, 4, 9)),
        "condition": np.broadcast_to(np.moveaxis(task.places, -1, 0), (8, 7, 3, 4, 4)),
        "text": TORUS.encode(["a seven moving left", ""] * 4),
    }
    loss = jax.jit(jax.value_and_grad(lambda p: task.loss(nnx.merge(graph, p), examples)))
    value, gradients = loss(params)
    return float(value), [np.asarray(x) for x in jax.tree.leaves(gradients)]


@pytest.mark.slow
def test_explicit_axes_have_the_loss_of_an_auto_mesh(small: Settings) -> None:
    devices = jax.devices()[:4]
    auto = jax.make_mesh(
        (2, 2), ("fsdp", "context"), (jax.sharding.AxisType.Auto,) * 2, devices=devices
    )
    explicit = jax.make_mesh((2, 2), ("fsdp", "context"), devices=devices)
    value, gradients = loss_and_gradients(small, auto)
    with jax.set_mesh(explicit), sharding.inside_auto_axes():
        found, ours = loss_and_gradients(small, explicit)
    assert found == pytest.approx(value, rel=1e-5)
    for one, other in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * max(1e-3, np.abs(other).max()))
