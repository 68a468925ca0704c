"""Deleted or unreadable arrays, and meshes without devices, raise maxattn's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import maxattn as ma
from maxattn import masks, sharding
from maxattn.errors import InputError, MeshError
from tests.reference import error

P = PartitionSpec
Q = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 4, 8)), jnp.float32)
X = Q.reshape(4, 16, 32)
HOW: dict[str, Any] = {"heads": 4, "dim_head": 8, "rngs": nnx.Rngs(0)}
CONFIG = ma.AttentionConfig(attention="dot_product", context_parallel="all_gather")


def gone(x: Any) -> Any:
    """Return a deleted copy of an array, as after donation."""
    copy = jnp.array(x)
    copy.delete()
    return copy


def lengths() -> Any:
    given = jnp.full((4,), 16)
    mask = masks.KeyPadding(given)
    given.delete()
    return mask


def rotary() -> Any:
    table = ma.rope_1d(8, 16)
    return ma.Rotary(gone(table.cos), gone(table.sin))


def cross(**given: Any) -> Any:
    return ma.CrossAttention(32, 32, **HOW)(X, **given)


def kv() -> Any:
    return ma.CrossAttention(32, 32, **HOW).compute_kv(X)


def place() -> None:
    module = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    module.kernel.get_value().delete()
    sharding.place(module, mesh_of())


DELETED: dict[str, tuple[str, Callable[[], Any]]] = {
    "q": ("q", lambda: ma.attention(gone(Q), Q, Q)),
    "k": ("k", lambda: ma.attention(Q, gone(Q), Q)),
    "v of a gradient": ("v", lambda: jax.grad(lambda q: ma.attention(q, Q, gone(Q)).sum())(Q)),
    "q of a plan": ("q", lambda: ma.Call.of(gone(Q), Q)),
    "bias": ("bias", lambda: ma.attention(Q, Q, Q, bias=gone(jnp.zeros((16, 16))))),
    "mask": ("mask", lambda: ma.attention(Q, Q, Q, mask=lengths())),
    "mask of an array": ("mask", lambda: ma.attention(Q, Q, Q, mask=gone(jnp.tri(16) > 0))),
    "states": ("hidden_states", lambda: ma.FlaxAttention(32, **HOW)(gone(X))),
    "text": ("encoder_hidden_states", lambda: cross(encoder_hidden_states=gone(X))),
    "kv": ("kv", lambda: cross(kv=jax.tree.map(gone, kv()))),
    "rotary": ("rotary_emb", lambda: ma.FlaxAttention(32, **HOW)(X, rotary())),
    "rotary alone": ("rotary_emb", lambda: ma.apply_rotary(Q, rotary())),
    "x of rotary": ("x", lambda: ma.apply_rotary(gone(Q), ma.rope_1d(8, 16))),
    "adapter": ("q", lambda: ma.attention_fn()(gone(Q), Q, Q)),
    "place": ("module", place),
}  # fmt: skip


@pytest.mark.parametrize("name", DELETED)
def test_a_deleted_array_is_refused(name: str) -> None:
    setting, call = DELETED[name]
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.setting == setting
    assert caught.value.rule.endswith("deleted, as arrays are that a program took by donation")
    remedy = "use what that program returned, or do not donate the array"
    assert caught.value.remedy == remedy


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_masked_array_is_refused_and_its_remedy_works(name: str) -> None:
    masked = np.ma.masked_array(np.asarray(Q), mask=np.asarray(Q) > 3)
    given: dict[str, Any] = {"q": Q, "k": Q, "v": Q}
    with pytest.raises(InputError) as caught:
        ma.attention(**given | {name: masked})
    assert caught.value.setting == name
    assert caught.value.rule == "a masked array of numpy is not read, since its mask would be lost"
    assert caught.value.remedy == (
        "pass x.filled(0), and leave keys out with mask=masks.KeyPadding(flags)"
    )
    flags = masks.KeyPadding(np.ones((4, 16), bool))
    ma.attention(**given | {name: masked.filled(0)}, mask=flags)


# ---- meshes without devices ----------------------------------------------------------------------


def mesh_of(kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices()[:4]
    return jax.make_mesh((2, 2), ("data", "context"), axis_types=(kind,) * 2, devices=devices)


def attend(q: Any, mesh: Any) -> Any:
    return ma.attention(q, q, q, config=CONFIG, mesh=mesh)


def module(mesh: Any) -> ma.FlaxAttention:
    return ma.FlaxAttention(32, config=CONFIG, mesh=mesh, **HOW)


ABSTRACT: dict[str, Callable[[Any], Any]] = {
    "eager": lambda mesh: attend(Q, mesh),
    "jit": lambda mesh: jax.jit(lambda q: attend(q, mesh))(Q),
    "gradient": lambda mesh: jax.jit(jax.grad(lambda q: attend(q, mesh).sum()))(Q),
    "module": lambda mesh: module(mesh)(X),
    "module, jit": lambda mesh: nnx.jit(lambda m, x: m(x))(module(mesh), X),
    "adapter": lambda mesh: jax.jit(lambda q: ma.attention_fn(CONFIG, mesh=mesh)(q, q, q))(Q),
    "stream": lambda mesh: ma.Stream(2, window=4).cache(
        layers=1, batch=2, kv_heads=2, dim_head=8, dtype="float32", mesh=mesh
    ),
    "constrain": lambda mesh: jax.jit(lambda x: sharding.constrain(x, mesh, "BT."))(X),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ABSTRACT)
def test_an_abstract_mesh_is_refused_where_no_device_is_known(name: str, kind: AxisType) -> None:
    with pytest.raises(MeshError) as caught:
        ABSTRACT[name](mesh_of(kind).abstract_mesh)
    found = caught.value
    assert (found.setting, found.value) == ("mesh", "AbstractMesh")
    assert (found.rule, found.remedy) == (
        "it has sizes but no devices", "pass a Mesh; only plan() needs no devices"
    )  # fmt: skip
    ABSTRACT[name](mesh_of(kind))  # the remedy


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_abstract_mesh_is_taken_where_the_arrays_are_on_its_mesh(kind: AxisType) -> None:
    mesh, want = mesh_of(kind), attend(Q, None)
    q = jax.device_put(Q, NamedSharding(mesh, P("data", "context")))
    got = [jax.jit(lambda q: attend(q, mesh.abstract_mesh))(q)]
    with jax.set_mesh(mesh):
        got.append(attend(q, mesh.abstract_mesh))
    for each in got:
        assert error(each, np.asarray(want)) < 1e-6
