"""Layers stacked by `nnx.vmap`: their shardings on a mesh, and `nnx.scan` over them in float64.

A scan equals a loop over layers, with no more transfers than its sharded axes need.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import maxattn as ma
from maxattn import weights
from maxattn.errors import MeshError, WeightsError
from maxattn.sharding import on_axes, parameter_shardings, place
from tests.golden_text import check_golden, check_refused
from tests.modules.reference import called, params_of
from tests.reference import error

P = PartitionSpec
C, LAYERS = 32, 3
CONFIG = ma.AttentionConfig(attention="dot_product")
X = np.random.default_rng(0).normal(size=(8, 6, C)).astype("f")
UNNAMED, NAMED = {}, {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}
NONE = {"transform_metadata": {nnx.PARTITION_NAME: None}}


def mesh_of(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)


def layer(rngs: nnx.Rngs) -> ma.FlaxAttention:
    how: dict[str, Any] = {"bias": True, "qk_norm": "rms_norm_across_heads", "config": CONFIG}
    return ma.FlaxAttention(C, heads=4, dim_head=4, **how, rngs=rngs)


def stacked(
    make: Callable[[nnx.Rngs], Any], *sizes: int, axis: int = 0, how: Any = UNNAMED
) -> Callable[[nnx.Rngs], Any]:
    """Stack layers once for each size, the first size outermost."""
    for size in reversed(sizes):
        mapped = nnx.vmap(make, in_axes=(0,), out_axes=axis, **how)
        make = nnx.split_rngs(splits=size)(mapped)
    return make


def spec(variable: Any) -> PartitionSpec:
    return variable.get_value().sharding.spec


# ---- where arrays lie ----------------------------------------------------------------------------

CASES = {
    "unnamed": ((LAYERS,), UNNAMED),
    "as many layers as devices": ((4,), UNNAMED),
    "as many layers as channels": ((C,), UNNAMED),
    "named": ((LAYERS,), NAMED),
    "none": ((LAYERS,), NONE),
    "twice": ((2, 4), UNNAMED),
    "twice, named": ((2, 4), NAMED),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("case", CASES)
def test_the_axis_of_layers_is_not_split(case: str, kind: AxisType) -> None:
    sizes, how = CASES[case]
    module = stacked(layer, *sizes, how=how)(nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
    mesh, first = mesh_of(kind), (None,) * len(sizes)
    place(module, mesh)
    place(optimizer, mesh)
    moments = [optimizer.opt_state[0].mu, optimizer.opt_state[0].nu]
    for held in (nnx.state(module, nnx.Param), *moments):
        found = jax.tree.map(lambda x: x.sharding.spec, nnx.to_pure_dict(held))
        assert found["to_q"] == {"kernel": P(*first, "fsdp", "tensor"), "bias": P(*first, "tensor")}
        assert found["to_out"]["kernel"] == P(*first, "tensor", "fsdp")
        assert found["to_out"]["bias"] == P(*first, None)
        assert found["norm_q"]["scale"] == P(*first, "tensor")


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "masked": optax.multi_transform(
        {True: optax.adam(1e-3), False: optax.sgd(1e-3)},
        lambda tree: jax.tree.map(lambda x: x.ndim > 2, tree),
    ),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("sizes", [pytest.param((), marks=SLOW), (4,)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_other_shapes_than_their_parameters(name: str, sizes: tuple[int, ...]) -> None:
    def update(place_on: Mesh | None) -> list[np.ndarray]:
        module = stacked(layer, *sizes)(nnx.Rngs(0))
        optimizer = nnx.Optimizer(module, OPTIMIZERS[name], wrt=nnx.Param)
        place(module, place_on)
        place(optimizer, place_on)
        gradients = jax.tree.map(lambda x: x * x, nnx.state(module, nnx.Param))
        nnx.jit(lambda o, m, g: o.update(m, g))(optimizer, module, gradients)
        return [np.asarray(x) for x in jax.tree.leaves(nnx.state(module, nnx.Param))]

    with jax.set_mesh(mesh := mesh_of(AxisType.Explicit)):
        got = update(mesh)
    for found, want in zip(got, update(None), strict=True):
        np.testing.assert_allclose(found, want, atol=1e-6)


@pytest.mark.parametrize("layers", [LAYERS, 16, C])  # as many as heads' channels, or as channels
def test_layers_that_are_stacked_at_the_end(layers: int) -> None:
    module = stacked(layer, layers, axis=-1)(nnx.Rngs(0))
    place(module, mesh_of())
    assert spec(module.to_q.kernel) == P("fsdp", "tensor", None)
    assert spec(module.to_q.bias) == spec(module.norm_q.scale) == P("tensor", None)


@pytest.mark.parametrize("case", ["unnamed", "named", "none"])
def test_one_layer_that_is_taken_from_a_stack(case: str) -> None:
    sizes, how = CASES[case]
    graph, state = nnx.split(stacked(layer, *sizes, how=how)(nnx.Rngs(0)))
    one = nnx.merge(graph, jax.tree.map(lambda x: x[0], state))
    place(one, mesh_of())
    assert spec(one.to_q.kernel) == P("fsdp", "tensor")
    assert spec(one.to_q.bias) == P("tensor")


def test_weights_are_loaded_to_where_place_puts_them() -> None:
    tensors = weights.to_diffusers(Named(LAYERS))
    loaded, mesh = nnx.eval_shape(lambda: Named(LAYERS)), mesh_of()
    weights.load_diffusers(loaded, tensors, mesh=mesh)
    assert spec(loaded.blocks.to_q.kernel) == P(None, "fsdp", "tensor")
    for name, tensor in weights.to_diffusers(loaded).items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)


class Stack(nnx.Module):
    """A stack in a plain attribute, or stacked twice or along another axis."""

    def __init__(self, *sizes: int, axis: int = 0) -> None:
        self.blocks = stacked(layer, *sizes, axis=axis)(nnx.Rngs(0))


class Named(Stack):
    diffusers_stacked = ("blocks",)


class Convolutions(nnx.Module):
    def __init__(self) -> None:
        make = lambda rngs: nnx.Conv(2, 4, (3, 3), rngs=rngs)  # noqa: E731
        self.blocks = stacked(make, LAYERS)(nnx.Rngs(0))


UNREADABLE: dict[str, Callable[[], nnx.Module]] = {
    "stack_without_a_name": lambda: Stack(LAYERS),
    "stack_of_convolutions": Convolutions,
    "stack_alone": lambda: Stack(LAYERS).blocks,
    "stack_of_stacks": lambda: Named(2, LAYERS),
    "stack_along_the_last_axis": lambda: Named(LAYERS, axis=-1),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_stack_that_files_cannot_number_is_refused(name: str) -> None:
    module, tensors = UNREADABLE[name](), weights.to_diffusers(Named(LAYERS))
    messages = set()
    for call in (weights.to_diffusers, lambda m: weights.load_diffusers(m, tensors, strict=False)):
        with pytest.raises(WeightsError) as caught:
            call(module)
        messages.add(str(caught.value))
    (message,) = messages
    check_golden(f"weights/{name}", message)


def test_a_mesh_axis_that_would_split_two_axes_is_refused_and_the_remedy_works() -> None:
    twice = {"transform_metadata": {nnx.PARTITION_NAME: "fsdp"}}
    given = stacked(layer, 4, how=twice)(nnx.Rngs(0)), mesh_of()
    check_refused("place/layers_over_an_axis_of_the_kernel", MeshError, place, *given)
    place(stacked(layer, 4, how=NAMED)(nnx.Rngs(0)), mesh_of())


# ---- layers of others, whose shape in one layer is unknown ---------------------------------------


def dense(**metadata: Any) -> Callable[[nnx.Rngs], nnx.Linear]:
    named = {"eager_sharding": False, **metadata}
    return lambda rngs: nnx.Linear(8, 16, kernel_metadata=named, rngs=rngs)


def test_names_without_a_layers_shape_are_for_the_last_axes(caplog: Any) -> None:
    module = stacked(dense(out_sharding=("fsdp", "tensor")), LAYERS)(nnx.Rngs(0))
    with caplog.at_level(logging.WARNING, "maxattn"):
        for _ in range(2):
            place(module, mesh_of())
    assert spec(module.kernel) == P(None, "fsdp", "tensor")
    (record,) = caplog.records
    assert record.getMessage() == (
        "kernel has shape [3, 8, 16] and the axis names ('fsdp', 'tensor'): the names are taken for"
        " the last axes, as in layers that nnx.vmap stacks. Name every axis, with None for one that"
        " is not split; nnx.vmap does so with transform_metadata={nnx.PARTITION_NAME: None}."
    )


@pytest.mark.parametrize("module", [
    stacked(dense(out_sharding=("fsdp", "tensor")), LAYERS, how=NONE),  # the remedy
    stacked(dense(**on_axes("fsdp", "tensor")), LAYERS),
])  # fmt: skip
def test_named_layers_give_no_warning(module: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "maxattn"):
        place(built := module(nnx.Rngs(0)), mesh_of())
    assert spec(built.kernel) == P(None, "fsdp", "tensor")
    assert not caplog.records


def test_several_mesh_axes_split_one_axis() -> None:
    for layers in (0, LAYERS):
        make = dense(out_sharding=(None, ("fsdp", "tensor")), layer_dims=(8, 16))
        place(module := stacked(make, *(layers,) * bool(layers))(nnx.Rngs(0)), mesh_of())
        assert spec(module.kernel)[-1] == ("fsdp", "tensor")


def test_the_last_names_of_a_layer_may_be_left_out() -> None:
    module = dense(out_sharding=("fsdp",))(nnx.Rngs(0))
    place(module, mesh_of())
    assert spec(module.kernel) == P("fsdp", None)


def test_flax_attention_that_is_stacked_and_swapped() -> None:
    def make(rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
        return nnx.MultiHeadAttention(
            4, 32, decode=False, kernel_metadata=on_axes("fsdp", "tensor", None), rngs=rngs
        )

    layers = stacked(make, LAYERS)(nnx.Rngs(0))
    want = nnx.jit(run)(layers, X)
    ma.swap(layers, CONFIG)
    place(layers, mesh_of())
    assert spec(layers.query.kernel) == P(None, "fsdp", "tensor", None)
    with jax.set_mesh(mesh_of()):
        got = nnx.jit(run)(layers, jax.device_put(X, NamedSharding(mesh_of(), P("fsdp"))))
    assert error(got, np.asarray(want)) < 2e-6


# ---- what runs -----------------------------------------------------------------------------------


def run(layers: Any, x: Any, how: Any = UNNAMED) -> Any:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **how)
    @nnx.remat
    def step(x: Any, one: Any) -> Any:
        return x + one(x)

    return step(x, layers)


def loss(layers: Any, x: Any, how: Any = UNNAMED) -> Any:
    y = run(layers, x, how)
    return jnp.sum(jnp.sin(y)), y


@cache
def in_float64() -> list[np.ndarray]:
    """Return loss, output and gradients of a loop over layers, in float64 on one device."""
    params = params_of(stacked(layer, LAYERS)(nnx.Rngs(0)))

    def loop(params: Any, x: Any) -> Any:
        for i in range(LAYERS):
            x = x + called(jax.tree.map(lambda a, i=i: a[i], params), one, x, xp=jnp)
        return jnp.sum(jnp.sin(x)), x

    with jax.enable_x64(True):
        one, exact = layer(nnx.Rngs(0)), (params, X.astype(np.float64))
        answer = jax.jit(jax.value_and_grad(loop, argnums=(0, 1), has_aux=True))(*exact)
        return [np.asarray(x) for x in jax.tree.leaves(answer)]


def compiled(kind: AxisType, how: Any) -> tuple[list[Any], Counter[str]]:
    """Return loss, output and gradients on eight devices, and the count of each transfer."""
    mesh = mesh_of(kind)
    layers = stacked(layer, LAYERS, how=how)(nnx.Rngs(0))
    with jax.set_mesh(mesh):
        place(layers, mesh)
        graph, state = nnx.split(layers)

        def both(state: nnx.State, x: Any) -> Any:
            f = nnx.value_and_grad(lambda m, x: loss(m, x, how), argnums=(0, 1), has_aux=True)
            return f(nnx.merge(graph, state), x)

        x = jax.device_put(X, NamedSharding(mesh, P("fsdp")))
        program = jax.jit(both).lower(state, x).compile()
        kinds = "all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter"
        moved = re.findall(rf" ({kinds})(?:-start)?\(", program.as_text())
        (value, y), (grad, dx) = program(state, x)
    return jax.tree.leaves(((value, y), (nnx.to_pure_dict(grad), dx))), Counter(moved)


@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=SLOW), AxisType.Explicit])
def test_a_scan_equals_a_loop_and_moves_what_named_axes_need(kind: AxisType) -> None:
    got, moved = compiled(kind, UNNAMED)
    for found, want in zip(got, in_float64(), strict=True):
        assert error(found, want) < 5e-6
    assert moved == compiled(kind, NONE)[1]
    assert moved["all-to-all"] == 0


def test_a_scan_over_a_named_axis() -> None:
    got, _ = compiled(AxisType.Explicit, NAMED)
    for found, want in zip(got, in_float64(), strict=True):
        assert error(found, want) < 5e-6


def test_the_trainers_state_has_its_parameters_shardings() -> None:
    shapes = nnx.state(nnx.eval_shape(lambda: stacked(layer, LAYERS)(nnx.Rngs(0))), nnx.Param)
    found = nnx.to_pure_dict(parameter_shardings(shapes, mesh_of()))
    assert found["to_v"]["kernel"].spec == P(None, "fsdp", "tensor")
