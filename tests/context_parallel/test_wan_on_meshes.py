"""The demo's whole model on meshes: output, loss and gradients as on one device.

With one of its blocks; in `make test-all` with two.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn.sharding import batch_sharding, place

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits.flow import loss_of
from digits.model import WanTransformer
from digits.settings import ModelSettings, Settings
from digits.text import encode

MESHES = {
    "fsdp 8": {"fsdp": 8},
    "context 8": {"context": 8},
    "tensor 2, context 2, fsdp 2": {"tensor": 2, "context": 2, "fsdp": 2},
    "data 2, ulysses_ring 4": {"data": 2, "context": 4},
}
ATTENTION = {"data 2, ulysses_ring 4": {"attention": "ulysses_ring", "ulysses_shards": 2}}
PROMPTS = ["a seven moving left", "an eight moving up"] * 4


def settings(
    sizes: dict[str, int], layers: int, attention: dict[str, Any] | None = None
) -> Settings:
    axes: dict[str, Any] = {
        f"ici_{axis}_parallelism": n for axis, n in ({"data": 1} | sizes).items()
    }
    return Settings(**axes, **attention or {}, model=ModelSettings(layers=layers))


def results(config: Settings, mesh: jax.sharding.Mesh | None):
    """Return the output, the loss and the gradients of one training step's loss, in float32."""
    model = WanTransformer(config, mesh, rngs=nnx.Rngs(0))
    # The head starts at zero, and would hide everything below it.
    kernel = model.head.proj_out.kernel
    kernel[...] = 0.02 * jax.random.normal(jax.random.key(5), kernel.shape)
    place(model, mesh)
    video = jax.random.normal(jax.random.key(1), (8, *config.video_shape))
    words = jnp.asarray(encode(PROMPTS))
    if mesh is not None:
        video, words = (jax.device_put(x, batch_sharding(mesh, x.ndim)) for x in (video, words))
    out = nnx.jit(lambda m, v, w: m(v, jnp.full(8, 0.3), w))(model, video, words)
    step = nnx.jit(
        nnx.value_and_grad(lambda m: loss_of(m, video, words, jax.random.key(2), config.training))
    )
    loss, grads = step(model)
    return out, loss, nnx.to_pure_dict(grads), model


@cache
def one_device(layers: int):
    return results(settings({}, layers), None)


# One axis alone is what the others are made of; test_meshes.py holds ulysses_ring to float64.
FEW = {("tensor 2, context 2, fsdp 2", 1)}


@pytest.mark.parametrize(
    ("name", "layers"),
    [pytest.param(*x, marks=[] if x in FEW else pytest.mark.slow) for x in product(MESHES, (1, 2))],
)
def test_output_loss_and_gradients_are_those_of_one_device(name: str, layers: int) -> None:
    config = settings(MESHES[name], layers, ATTENTION.get(name))
    out, loss, grads, model = results(config, config.make_mesh())
    want_out, want_loss, want_grads, _ = one_device(layers)
    np.testing.assert_allclose(out, want_out, atol=2e-5 * float(jnp.abs(want_out).max()))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for (path, got), want in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
    ):
        scale = max(float(jnp.abs(want).max()), 1e-3)
        np.testing.assert_allclose(got, want, atol=1e-4 * scale, err_msg=jax.tree_util.keystr(path))
    if "fsdp" in MESHES[name]:
        kernel = model.blocks[0].attn1.to_q.kernel.get_value()
        assert (
            kernel.sharding.shard_shape(kernel.shape)[0] == kernel.shape[0] // MESHES[name]["fsdp"]
        )
