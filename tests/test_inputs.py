"""Mistakes in a user's inputs: each raises maxattn's own error, with a golden text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import MaxattnError
from tests.golden_text import check_golden
from tests.torch_tensor import torch_tensor

Q = jnp.zeros((2, 8, 4, 16))
CPU = ma.Target.named("cpu")


def make_mesh(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def attend(**changes: Any) -> Any:
    given: dict[str, Any] = {"q": Q, "k": Q, "v": Q} | changes
    return ma.attention(**given)


def under_another_mesh() -> None:
    with jax.set_mesh(make_mesh(data=4)):
        attend(mesh=make_mesh(data=2))


def module_under_another_mesh() -> None:
    module = ma.FlaxAttention(32, heads=2, dim_head=16, mesh=make_mesh(data=2), rngs=nnx.Rngs(0))
    with jax.set_mesh(make_mesh(dp=2, sp=2)):
        module(jnp.ones((4, 24, 32)))


def under_a_mesh_with_another_name() -> Any:
    with jax.set_mesh(make_mesh(data=2, model=2, seq=2)):
        return attend()


def explicit_attend(spec: P) -> Any:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 4, 2, 16)), NamedSharding(mesh, spec))
        return ma.attention(x, x, x)


def explicit_module(x: Any) -> Any:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        return ma.FlaxAttention(32, heads=2, dim_head=16, rngs=nnx.Rngs(0))(x)


def attend_q(q: Any, **settings: Any) -> Any:
    return ma.attention(q, Q, Q, config=ma.AttentionConfig(**settings))


FLASH = partial(attend_q, attention="flash")


def second_derivative(**settings: Any) -> Any:
    slope = jax.grad(lambda q: (attend_q(q, **settings) ** 2).sum())
    return jax.jit(jax.grad(lambda q: (slope(q) ** 2).sum()))(Q)


def exported(shape: str):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)
    return jax.export.export(jax.jit(lambda q: ma.attention(q, q, q)))(x)


def plan(config: Any = None, mesh: Any = None, target: Any = CPU, **call: Any) -> ma.Plan:
    return ma.plan(ma.Call.of(Q, Q, **call), config, mesh, target)


REFUSED: dict[str, Callable[[], Any]] = {
    "config_dict": lambda: attend(config={"attention": "dot_product"}),
    "config_empty_dict": lambda: plan({}),
    "config_path": lambda: plan("attention.yml"),
    "q_list": lambda: attend(q=[[1.0]]),
    "k_none": lambda: attend(k=None),
    "v_none": lambda: attend(v=None),
    "bias_number": lambda: attend(bias=1.0),
    "bias_mask": lambda: attend(bias=M.Causal()),
    "return_lse_text": lambda: attend(return_lse="yes"),
    "scale_text": lambda: attend(scale="half"),
    "scale_text_of_a_number": lambda: attend(scale="0.1"),
    "scale_true": lambda: attend(scale=True),
    "bias_float64": lambda: attend(bias=np.ones((8, 8))),
    "sizes_not_numbers": lambda: exported("b, 8, 2, 4"),
    "scale_beyond_float32": lambda: attend(scale=-1e39),
    "scale_of_400_digits": lambda: attend(scale=10**400),
    "scale_that_float32_rounds_to_0": lambda: attend(scale=1e-46),
    "k_without_values": lambda: attend(k=jax.ShapeDtypeStruct(Q.shape, Q.dtype)),
    "q_of_torch": lambda: attend(q=torch_tensor(Q.shape)),
    "v_of_torch_bfloat16": lambda: attend(v=torch_tensor(Q.shape, "bfloat16")),
    "mask_of_queries_or_examples": lambda: attend(q=Q[:, :2], mask=jnp.ones((2, 8), bool)),
    "mask_of_torch": lambda: attend(mask=torch_tensor((8, 8), "bool")),
    "bias_of_torch": lambda: attend(bias=torch_tensor((8, 8))),
    "forward_mode": lambda: jax.jvp(FLASH, (Q,), (Q,)),
    "forward_mode_under_jit": lambda: jax.jit(jax.jacfwd(FLASH))(Q),
    "forward_mode_outside_jit": lambda: jax.jacfwd(jax.jit(FLASH))(Q),
    "linearized": lambda: jax.linearize(FLASH, Q)[1](Q),
    "second_derivative": lambda: second_derivative(use_memory_efficient_attention=True),
    "second_derivative_of_flash": lambda: second_derivative(attention="flash"),
    "forward_over_reverse": lambda: jax.hessian(lambda q: attend_q(q, attention="flash").sum())(Q),
    "scale_infinite": lambda: attend(scale=float("inf")),
    "mesh_sizes_alone": lambda: attend(mesh={"data": 2}),
    "mesh_text": lambda: plan(mesh="data"),
    "mesh_list": lambda: attend(mesh=[1, 2]),
    "mesh_size_text": lambda: plan(mesh={"data": "2"}),
    "mesh_one_other_name": lambda: attend(mesh=make_mesh(data=2, model=4)),
    "mesh_one_other_name_in_a_plan": lambda: plan(mesh=make_mesh(context=4, stage=2)),
    "mesh_one_other_name_around": under_a_mesh_with_another_name,
    "mesh_other_names": lambda: attend(mesh=make_mesh(dp=2, mp=4)),
    "explicit_layout": lambda: explicit_attend(P(None, None, None, "data")),
    "explicit_layout_of_two_axes": lambda: explicit_attend(P(None, ("data", "tensor"))),
    "explicit_module_of_one_axis": lambda: explicit_module(jnp.ones((4, 32))),
    "mesh_without_devices": lambda: attend(mesh=AbstractMesh((2,), ("data",))),
    "mesh_not_the_surrounding": under_another_mesh,
    "module_not_in_the_surrounding": module_under_another_mesh,
    "mesh_not_where_q_is": lambda: attend(
        q=jax.device_put(Q, jax.devices()[0]), mesh=make_mesh(data=2)
    ),
    "target_text": lambda: plan(target="TPU v5p"),
    "call_arrays": lambda: ma.plan(Q),  # type: ignore[arg-type]
    "call_mask_like_padding": lambda: ma.Call.of(Q, Q, mask=jnp.ones((2, 8), bool)),
    "kernel_inside_a_strategy": lambda: plan(
        ma.AttentionConfig(attention="ring", attention_kernel="cudnn")
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(MaxattnError) as caught:
        REFUSED[name]()
    check_golden(f"inputs/{name}", f"{type(caught.value).__name__}\n{caught.value}")


def test_a_mask_of_as_many_queries_as_examples_is_taken_as_it_is_written() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (3, 3, 2, 4)) for i in range(3))
    table = jnp.tri(3, dtype=bool)
    bias = jnp.where(table, 0.0, -1e9)
    attend = partial(ma.attention, q, k, v)
    by_query, by_example = attend(bias=bias[None]), attend(bias=bias[:, None, None])
    assert not jnp.allclose(by_query, by_example, atol=0.1)
    for mask in (table[None], table[None, None], M.Dense(table)):
        np.testing.assert_allclose(attend(mask=mask), by_query, atol=1e-5)
    for mask in (table[:, None, None], M.KeyPadding(table)):
        np.testing.assert_allclose(attend(mask=mask), by_example, atol=1e-5)


def test_one_row_is_a_mask_of_keys_either_way() -> None:
    q = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
    flags = jnp.array([[True, False, True]])
    want = ma.attention(q, q, q, mask=M.KeyPadding(flags))
    np.testing.assert_allclose(ma.attention(q, q, q, mask=flags), want, atol=1e-6)
    one = ma.attention(q[:, :1], q, q, mask=flags)
    np.testing.assert_allclose(one, want[:, :1], atol=1e-6)


def test_axes_of_others_are_taken_by_a_shard_map_around() -> None:
    mesh, q = make_mesh(pipe=4, data=2), jnp.arange(4 * 2 * 8 * 2 * 4.0).reshape(8, 8, 2, 4)

    def loss(q: Any) -> Any:
        stage = lambda q: ma.attention(q, q, q + 1, mesh=mesh)  # noqa: E731
        specs = {"in_specs": P("pipe"), "out_specs": P("pipe"), "axis_names": {"pipe"}}
        return jax.shard_map(stage, mesh=mesh, **specs)(q).sum()

    grads = jax.jit(jax.grad(loss))(q)
    want = jax.grad(lambda q: ma.attention(q, q, q + 1).sum())(q)
    assert jnp.allclose(grads, want, atol=1e-4)


def test_a_surrounding_mesh_of_others_is_left_alone() -> None:
    with jax.set_mesh(make_mesh(dp=2, mp=4)):
        assert ma.attention(Q, Q, Q).shape == Q.shape


def test_the_order_of_a_meshs_axes_is_no_part_of_the_plan() -> None:
    one, other = (plan(mesh=x) for x in (make_mesh(tensor=2, data=2), {"data": 2, "tensor": 2}))
    assert one == other
