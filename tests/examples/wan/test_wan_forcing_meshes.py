"""A training step by forcing on a mesh: loss and gradients are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import hosts
from flax import nnx
from train import state
from wan.settings import Settings
from wan.task import WanTask

import maxattn as ma
from tests.examples.train.made import WAN, drawn, wan
from tests.waiting import but

BATCH = 2
ALL = {"data": 2, "context": 2, "tensor": 2}
# Clips of 8 frames are dealt to 4 devices as whole blocks of 2; those of 6 frames stay as they are.
CASES = [("teacher", 8, ALL), ("diffusion", 8, ALL), ("teacher", 6, {"context": 4})]


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    names = {f"ici_{axis}_parallelism": n for axis, n in sizes.items()}
    config = ma.AttentionConfig(**{"ici_data_parallelism": 1} | names)
    return config.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))])


def step(task: WanTask, mesh: Any, frames: int) -> tuple[Any, Any]:
    """Return loss and gradients of the first step of a run."""
    graph, parameters = nnx.split(state.build(task, mesh))
    examples = drawn("wan", BATCH, latents=(4, frames, 4, 4))
    rows = hosts.rows_here(BATCH, mesh)
    batch = {n: hosts.on_devices(x[rows], rows, BATCH, mesh) for n, x in examples.items()}

    @jax.jit
    def of(parameters: Any, batch: Any) -> Any:
        noised = task.noised(batch, {"text": jnp.zeros((3, 6))}, jax.random.key(0))
        return jax.value_and_grad(lambda p: task.loss(nnx.merge(graph, p), noised))(parameters)

    return of(parameters, batch)


@pytest.mark.parametrize(("how", "frames", "sizes"), but(CASES, CASES[:1]))
def test_a_step_on_a_mesh_is_that_of_one_device(
    how: str, frames: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    noise = {"context_noise": 100.0, "context_dropout": 0.5} if how == "teacher" else {}
    rollout = {"frames_per_block": 2, "window": 2, "sink": 1}
    settings = wan(tmp_path, WAN | {"num_layers": 1}, forcing=how, batch_size=BATCH, **noise)
    settings = settings.replace(rollout=Settings.model_validate({"rollout": rollout}).rollout)
    task = WanTask.of(settings)
    (loss, grads), (wanted, of_one) = (step(task, x, frames) for x in (mesh_of(sizes), None))
    assert float(loss) == pytest.approx(float(wanted), 1e-5)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(of_one), strict=True):
        scale = float(jnp.abs(want).max()) if want.size else 0.0
        np.testing.assert_allclose(got, want, atol=1e-5 * scale + 1e-7)
