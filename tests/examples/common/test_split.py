"""A model as a structure and a tuple of arrays: put together again it is the same model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common.split import split
from flax import nnx
from flux.model import FluxTransformer2D
from flux.sizes import Sizes as FluxSizes

import maxattn as ma
from maxattn import sharding
from tests.examples.wan.streamed import small

FLUX = FluxSizes(2, 12, 2, 1, 16, 8, 8, True, (4, 4, 4))


def test_a_model_put_together_again_computes_the_same() -> None:
    model = FluxTransformer2D(FLUX, rngs=nnx.Rngs(0))
    structure, leaves = split(model)
    x, text, pooled = jnp.ones((1, 4, 6, 4)), jnp.ones((1, 3, 8)), jnp.ones((1, 8))
    given = x, jnp.array([500.0]), text, pooled, jnp.array([3.5])
    found = jax.jit(lambda leaves: structure.merge(leaves)(*given))(leaves)
    np.testing.assert_allclose(found, nnx.jit(lambda m: m(*given))(model), atol=1e-6)


def test_arrays_keep_their_places_on_a_mesh() -> None:
    mesh = ma.AttentionConfig(
        ici_fsdp_parallelism=2, ici_context_parallelism=2, ici_tensor_parallelism=2
    ).make_mesh()
    model = small(mesh)
    sharding.place(model, mesh)
    structure, leaves = split(model)
    for one, other in zip(leaves, jax.tree.leaves(nnx.state(model)), strict=True):
        assert one is other
    again = jax.tree.leaves(nnx.state(structure.merge(leaves)))
    assert [x.sharding for x in again] == [x.sharding for x in leaves]
    assert any(not x.is_fully_replicated for x in leaves)


@pytest.mark.parametrize("shapes", [False, True])
def test_models_that_are_built_alike_share_a_structure(shapes: bool) -> None:
    one = split(small())[0]
    other, leaves = split(nnx.eval_shape(small) if shapes else small())
    assert one == other and hash(one) == hash(other)
    assert isinstance(leaves[0], jax.ShapeDtypeStruct if shapes else jax.Array)
    assert one != split(small(scan_layers=False))[0]
