"""A module saved on one mesh loads on another, its parameters laid out for the new one, with the
same output.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import maxattn as ma
from maxattn.sharding import parameter_shardings, place

MESHES = {
    "fsdp 8": {"fsdp": 8},
    "tensor 2, context 2, fsdp 2": {"tensor": 2, "context": 2, "fsdp": 2},
    "tensor 4, data 2": {"tensor": 4, "data": 2},
}


def config(name: str) -> ma.AttentionConfig:
    return ma.AttentionConfig(
        **{f"ici_{a}_parallelism": n for a, n in ({"data": 1} | MESHES[name]).items()}
    )


def module(cfg: ma.AttentionConfig, mesh: jax.sharding.Mesh | None, seed: int) -> ma.FlaxAttention:
    return ma.FlaxAttention(
        32,
        heads=4,
        dim_head=8,
        bias=True,
        qk_norm="rms_norm_across_heads",
        config=cfg,
        mesh=mesh,
        rngs=nnx.Rngs(seed),
    )


@pytest.mark.parametrize(
    ("saved", "loaded"), [("fsdp 8", "tensor 2, context 2, fsdp 2"), ("tensor 4, data 2", "fsdp 8")]
)
def test_saved_on_one_mesh_loads_on_another(saved: str, loaded: str, tmp_path: Path) -> None:
    x = jax.random.normal(jax.random.key(0), (8, 13, 32))
    old_mesh, new_mesh = config(saved).make_mesh(), config(loaded).make_mesh()
    old = module(config(saved), old_mesh, seed=0)
    place(old, old_mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.to_pure_dict(nnx.state(old)))
        checkpointer.wait_until_finished()
        new = module(config(loaded), new_mesh, seed=1)
        state = nnx.state(new)
        abstract = jax.tree.map(
            lambda v, s: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s),
            nnx.to_pure_dict(state),
            nnx.to_pure_dict(parameter_shardings(state, new_mesh)),
        )
        nnx.replace_by_pure_dict(state, checkpointer.restore(tmp_path / "model", abstract))
    nnx.update(new, state)
    kernel = new.to_q.kernel.get_value()
    shards = dict(MESHES[loaded])
    assert kernel.sharding.shard_shape(kernel.shape) == (
        32 // shards.get("fsdp", 1),
        32 // shards.get("tensor", 1),
    )
    np.testing.assert_array_equal(kernel, old.to_q.kernel.get_value())
    want = module(config(saved), None, seed=0)(x)
    for m in (old, new):
        assert jnp.allclose(nnx.jit(lambda m, x: m(x))(m, x), want, atol=1e-5)
