"""A module saved on one mesh loads on another, with that mesh's layout and the same output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

import maxattn as ma
from maxattn.sharding import parameter_shardings, place


def on_mesh(seed: int, **axes: int) -> tuple[ma.FlaxAttention, Any]:
    config = ma.AttentionConfig(**{f"ici_{a}_parallelism": n for a, n in axes.items()})
    mesh = config.make_mesh()
    how: dict[str, Any] = {"config": config, "mesh": mesh, "rngs": nnx.Rngs(seed)}
    sizes: dict[str, Any] = {"heads": 4, "dim_head": 8, "qk_norm": "rms_norm_across_heads"}
    return ma.FlaxAttention(32, **sizes, bias=True, **how), mesh


def test_saved_on_one_mesh_loads_on_another(tmp_path: Path) -> None:
    x = jax.random.normal(jax.random.key(0), (8, 13, 32))
    (old, old_mesh), (new, mesh) = on_mesh(0, data=2, tensor=4), on_mesh(1, tensor=2, fsdp=4)
    place(old, old_mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.to_pure_dict(nnx.state(old)))
        checkpointer.wait_until_finished()
        state = nnx.state(new)
        abstract = jax.tree.map(
            lambda v, s: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s),
            nnx.to_pure_dict(state),
            nnx.to_pure_dict(parameter_shardings(state, mesh)),
        )
        nnx.replace_by_pure_dict(state, checkpointer.restore(tmp_path / "model", abstract))
    nnx.update(new, state)
    kernel = new.to_q.kernel.get_value()
    assert kernel.sharding.shard_shape(kernel.shape) == (32 // 4, 32 // 2)
    np.testing.assert_array_equal(kernel, old.to_q.kernel.get_value())
    got, want = (nnx.jit(lambda m, x: m(x))(m, x) for m in (new, old))
    np.testing.assert_allclose(got, want, atol=1e-5)
