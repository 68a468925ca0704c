"""Names, layouts and files: bit for bit in both directions, and onto a mesh."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from maxattn import sharding, weights
from maxattn.errors import WeightsError
from tests.golden_text import check_golden
from tests.weights.models import Model, equal, mesh, model_of, values


def test_names_and_shapes_are_diffusers():
    lines = [
        f"{entry.name} {list(entry.shape)}"
        for entry in weights.entries(model_of(0), "transformer.")
    ]
    check_golden("weights/names", "\n".join(lines))


def test_layouts_are_torchs():
    model = model_of(0)
    state = weights.to_diffusers(model)
    x = jax.random.normal(jax.random.key(1), (2, 16))
    up = model.blocks[0].ffn["up"]
    want = x @ state["blocks.0.ffn.net.0.proj.weight"].T + state["blocks.0.ffn.net.0.proj.bias"]
    np.testing.assert_allclose(up(x), want, atol=1e-6)
    np.testing.assert_array_equal(
        state["patch.weight"], np.asarray(model.patch.kernel[...]).transpose(4, 3, 0, 1, 2)
    )
    third = np.asarray(model.stacked.attn1.to_out.kernel[...])[2]
    np.testing.assert_array_equal(state["stacked.2.attn1.to_out.0.weight"], third.T)


def test_both_ways_is_bit_for_bit(tmp_path: Path):
    one, other = model_of(0), model_of(9)
    for model in (one, other):
        blocks = nnx.state(model.blocks, nnx.Param)
        nnx.update(model.blocks, jax.tree.map(lambda x: x.astype("bfloat16"), blocks))
    files = weights.save_diffusers(one, tmp_path / "whole", shard_bytes=4000)
    index = json.loads(files[-1].read_text())
    assert len(files) > 3
    assert index["weight_map"].keys() == weights.to_diffusers(one).keys()
    assert index["metadata"]["total_size"] == sum(
        x.nbytes for x in weights.to_diffusers(one).values()
    )
    assert not list((tmp_path / "whole").glob("*.partial"))
    assert weights.load_diffusers(other, tmp_path / "whole") == weights.Loaded()
    equal(one, other)
    # What is written again is the same, file for file.
    again = weights.save_diffusers(other, tmp_path / "again", shard_bytes=4000)
    assert [f.read_bytes() for f in again] == [f.read_bytes() for f in files]


def test_onto_a_mesh_without_arrays_before(tmp_path: Path):
    one = model_of(0)
    weights.save_diffusers(one, tmp_path)
    empty = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    weights.load_diffusers(empty, tmp_path, mesh=mesh())
    equal(one, empty)
    kernel = empty.blocks[1].attn1.to_q.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (4, 8)
    # Arrays that have a place keep it.
    placed = model_of(9)
    sharding.place(placed, mesh())
    weights.load_diffusers(placed, tmp_path)
    equal(one, placed)
    assert placed.blocks[1].attn1.to_q.kernel[...].sharding == kernel.sharding


def test_a_mesh_takes_arrays_that_are_there_too():
    """All arrays move, so that a jit under the mesh runs; an error moves none."""
    want, inner = model_of(0), model_of(9)
    model = nnx.Dict(model=inner, dropout=nnx.Dropout(0.1, rngs=nnx.Rngs(0)))
    state = weights.to_diffusers(want, "model.")
    bad = state | {"model.norm.bias": np.zeros(3)}
    with pytest.raises(WeightsError):
        weights.load_diffusers(model, bad, mesh=mesh())
    assert len(inner.words.embedding.get_value().devices()) == 1
    del state["model.norm.bias"]
    weights.load_diffusers(model, state, strict=False, mesh=mesh())
    devices = set(mesh().devices.flat)
    assert all(x.sharding.device_set == devices for x in jax.tree.leaves(nnx.state(model)))
    placed = model_of(0)
    sharding.place(placed, mesh())
    kernel = inner.blocks[1].attn1.to_q.kernel.get_value()
    assert kernel.sharding == placed.blocks[1].attn1.to_q.kernel.get_value().sharding
    np.testing.assert_array_equal(kernel, want.blocks[1].attn1.to_q.kernel.get_value())
    with jax.set_mesh(mesh()):
        nnx.jit(lambda m: m.norm(jnp.ones((2, 16))))(inner)


def test_a_parameter_keeps_its_dtype():
    model = model_of(0)
    state = {k: v.astype(ml_dtypes.bfloat16) for k, v in weights.to_diffusers(model).items()}
    weights.load_diffusers(model, state)
    assert {x.dtype for x in values(model).values()} == {np.dtype("float32")}
    np.testing.assert_array_equal(
        values(model)["patch.kernel"].transpose(4, 3, 0, 1, 2), state["patch.weight"]
    )
