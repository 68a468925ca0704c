"""Training under meshes as `jax.make_mesh` makes them, with Explicit axes, equals one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from digits import text
from digits.settings import Settings
from digits.task import DigitsTask
from flax import nnx

from maxattn import sharding


def loss_and_gradients(settings: Settings, mesh: Any, roll: int = 0) -> Any:
    """Compute the loss of a model none of whose parameters is zero: its attention counts.

    Args:
        settings: of a small model.
        mesh: to compute on.
        roll: by so many heads the values of self-attention are turned.
    """
    task, mesh = DigitsTask(settings), sharding.program_mesh(mesh)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = task.build(mesh, nnx.Rngs(0))
    graph, params = nnx.split(model)
    leaves, form = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    filled = [
        jax.device_put(np.asarray(x) + rng.normal(size=x.shape).astype("f") / 4, everywhere)
        for x in leaves
    ]
    params = jax.tree.unflatten(form, filled)
    for path, kernel in nnx.to_flat_state(params):
        if path[-3:] == ("attn1", "to_v", "kernel"):
            values = kernel.get_value()
            turned = np.roll(np.asarray(values), roll * settings.model.dim_head, axis=-1)
            kernel.set_value(jax.device_put(turned, everywhere))
    examples = {
        "mixed": jax.random.normal(jax.random.key(2), (8, *settings.video_shape)),
        "times": np.linspace(0.1, 1.0, 8, dtype=np.float32),
        "velocity": jax.random.normal(jax.random.key(3), (8, *settings.video_shape)),
        "words": text.encode(["a seven moving left", "three"] * 4),
    }
    loss = jax.jit(jax.value_and_grad(lambda p: task.loss(nnx.merge(graph, p), examples)))
    value, gradients = loss(params)
    return float(value), [np.asarray(x) for x in jax.tree.leaves(gradients)]


def test_a_model_whose_attention_counts_has_the_loss_of_an_auto_mesh(small: Settings) -> None:
    """And a mistake of one head in its values would be seen."""
    devices = jax.devices()[:4]
    auto = jax.make_mesh(
        (2, 2), ("fsdp", "context"), (jax.sharding.AxisType.Auto,) * 2, devices=devices
    )
    explicit = jax.make_mesh((2, 2), ("fsdp", "context"), devices=devices)
    value, gradients = loss_and_gradients(small, auto)
    rolled, _ = loss_and_gradients(small, auto, roll=1)
    assert abs(rolled / value - 1) > 1e-3, "the loss hangs on which head has which values"
    with jax.set_mesh(explicit), sharding.inside_auto_axes():
        found, ours = loss_and_gradients(small, explicit)
    assert found == pytest.approx(value, rel=1e-5)
    for one, other in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * max(1e-3, np.abs(other).max()))
