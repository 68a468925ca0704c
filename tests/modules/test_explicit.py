"""Modules, `attention_fn` and `swap` under meshes with Explicit and Auto axes equal one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import maxattn as ma
from maxattn import masks as M
from maxattn.rope import rope_1d
from maxattn.sharding import place
from tests.modules.reference import compiled
from tests.reference import error
from tests.sharding.test_explicit import KINDS, mesh_of
from tests.waiting import but

P = PartitionSpec
CONFIG = ma.AttentionConfig(attention="dot_product", context_parallel="all_gather")
RNG = np.random.default_rng(0)
X, TEXT = (RNG.normal(size=size).astype("f") for size in ((2, 16, 32), (2, 6, 24)))
MASK = M.KeyPadding(np.array([10, 16], np.int32))
HEADS: dict[str, Any] = {"heads": 4, "dim_head": 8, "config": CONFIG}
ROTARY = rope_1d(8, 16)


def modules() -> list[Any]:
    """Build self-, cross- and joint attention."""
    return [
        ma.FlaxAttention(32, qk_norm="rms_norm", **HEADS, rngs=nnx.Rngs(0)),
        ma.CrossAttention(32, 24, **HEADS, rngs=nnx.Rngs(1)),
        ma.JointAttention(32, 24, **HEADS, rngs=nnx.Rngs(2)),
    ]


def loss(built: list[Any], x: Any, text: Any) -> Any:
    own, cross, joint = built
    y = own(x, ROTARY, mask=MASK)
    y = cross(y, kv=cross.compute_kv(text)) + cross(y, text)
    picture, words = joint(y, encoder_hidden_states=text)
    apart = joint.without_out_bias(y, text)
    again = sum(jnp.sum((y if bias is None else y + bias) ** 2) for y, bias in apart)
    return (picture**2).sum() + (words**2).sum() + again, (picture, words)


@nnx.jit
def both(built: list[Any], x: Any, text: Any) -> Any:
    return nnx.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(built, x, text)


@pytest.fixture(scope="module")
def one_device() -> list[Any]:
    """The modules' outputs and gradients on one device."""
    return jax.tree.leaves(both(modules(), X, TEXT))


# tests/sharding/test_explicit.py has every way to name a mesh with every kind of mesh.
WAYS = [("explicit", "passed"), ("mixed", "ambient"), ("context alone", "none"), ("auto", "passed")]


@pytest.mark.parametrize(("axes", "how"), but(WAYS, WAYS[-2:]))
def test_modules_equal_one_device(axes: str, how: str, one_device: list[Any]) -> None:
    mesh = mesh_of(KINDS[axes])
    with jax.set_mesh(mesh if how == "ambient" else None):
        built = modules()
        for module in built:
            module.mesh = mesh if how == "passed" else None
            place(module, mesh)
        x = jax.device_put(X, NamedSharding(mesh, P("fsdp", "context")))
        text = jax.device_put(TEXT, NamedSharding(mesh, P("fsdp")))
        got = both(built, x, text)
    (_, (picture, words)), _ = got
    assert jax.typeof(picture) == jax.typeof(x)
    assert jax.typeof(words) == jax.typeof(text)
    for g, want in zip(jax.tree.leaves(got), one_device, strict=True):
        assert error(g, np.asarray(want)) < 2e-5


def test_eager_modules_draw_new_dropout_each_time() -> None:
    module = ma.FlaxAttention(32, dropout=0.5, **HEADS, rngs=nnx.Rngs(0))
    module.train()
    mesh, rngs = mesh_of(), nnx.Rngs(dropout=1)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("fsdp", "context")))
        drawn = [np.asarray(module(x, rngs=rngs)) for _ in range(2)]
        drawn.append(np.asarray(module(x, None, None, None, None, nnx.Rngs(dropout=1))))
    assert (drawn[0] != drawn[1]).any()
    np.testing.assert_array_equal(drawn[0], drawn[2])


@pytest.mark.parametrize("axes", list(KINDS))
def test_flax_attention_equals_one_device(axes: str) -> None:
    mesh = mesh_of(KINDS[axes])
    how: dict[str, Any] = {"decode": False, "rngs": nnx.Rngs(0)}
    layer = nnx.MultiHeadAttention(4, 32, **how)
    want = np.asarray(compiled(layer, X))
    with jax.set_mesh(mesh):
        ma.swap(layer, CONFIG)
        x = jax.device_put(X, NamedSharding(mesh, P("fsdp", "context")))
        got = compiled(layer, x)
    assert error(got, want) < 2e-5


@pytest.mark.parametrize("names", [("fsdp", "context"), ("data", "model")])
def test_modules_are_made_under_a_mesh_without_some_of_their_axes(names: tuple[str, str]) -> None:
    mesh = jax.make_mesh((2, 2), names, devices=jax.devices()[:4])

    def build() -> ma.CrossAttention:
        return ma.CrossAttention(32, 24, **HEADS, rngs=nnx.Rngs(1))

    with jax.set_mesh(mesh):
        shapes, built = nnx.eval_shape(build), nnx.jit(build)()
    assert built.to_q.kernel.get_value().shape == shapes.to_q.kernel.get_value().shape
