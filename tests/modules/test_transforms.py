"""The modules under jit, vmap, scan, remat and on meshes; their state and static parts."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from maxattn import masks, sharding
from maxattn.config import AttentionConfig
from maxattn.modules import CrossAttention, FlaxAttention, attention_fn
from maxattn.rope import rope_1d
from tests.lines_run import lines_run
from tests.modules.reference import compiled

C, N, H, T, S = 16, 4, 8, 16, 6
X = jax.random.normal(jax.random.key(0), (8, T, C))
TEXT = jax.random.normal(jax.random.key(1), (8, S, C))
ROPE = rope_1d(H, T)
SIZES: dict[str, Any] = {"heads": N, "dim_head": H}
NORMED: dict[str, Any] = SIZES | {"qk_norm": "rms_norm_across_heads", "bias": True}


def attn(**how: Any) -> FlaxAttention:
    return FlaxAttention(C, **(NORMED | how), rngs=nnx.Rngs(0))


def cross(**how: Any) -> CrossAttention:
    return CrossAttention(C, **(NORMED | how), rngs=nnx.Rngs(0))


# ---- jit and the static side ---------------------------------------------------------------------


def test_a_second_call_traces_nothing() -> None:
    traces = []

    @nnx.jit
    def step(a: FlaxAttention, c: CrossAttention, x: jax.Array, text: jax.Array) -> jax.Array:
        traces.append(1)
        return c(a(x, ROPE, mask=masks.KeyPadding(jnp.full(8, 12))), text)

    module, other = attn(), cross()
    first = step(module, other, X, TEXT)
    second = step(module, other, X + 1.0, TEXT)
    step(attn(), cross(), X, TEXT)  # modules built alike share the trace
    assert len(traces) == 1
    assert (first != second).any()


def test_the_hash_of_the_static_side_is_kept() -> None:
    config = AttentionConfig.from_overrides(
        ["attention=dot_product", "flash_block_sizes.block_q=1024"]
    )
    graphdef, _ = nnx.split(attn(config=config, mesh=jax.make_mesh((8,), ("fsdp",))))
    hash(graphdef)
    lines_run(lambda: hash(graphdef), most=100)


def test_abstract_modules_need_no_memory() -> None:
    abstract = nnx.eval_shape(
        lambda: FlaxAttention(1 << 14, heads=128, dim_head=128, rngs=nnx.Rngs(0))
    )
    assert abstract.to_q.kernel.get_value().shape == (1 << 14, 1 << 14)
    assert isinstance(abstract.to_q.kernel.get_value(), jax.ShapeDtypeStruct)


# ---- vmap, scan, remat ---------------------------------------------------------------------------


def one_of(many: Any, i: int) -> Any:
    graphdef, state = nnx.split(many)
    return nnx.merge(graphdef, jax.tree.map(lambda a: a[i], state))


def test_vmap_over_inputs_and_over_modules() -> None:
    module, xs = attn(), X.reshape(2, 4, T, C)
    got = jax.jit(jax.vmap(lambda x: module(x, ROPE)))(xs).reshape(X.shape)
    np.testing.assert_allclose(got, compiled(module, X, ROPE), atol=1e-5)

    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs: nnx.Rngs) -> FlaxAttention:
        return FlaxAttention(C, **SIZES, rngs=rngs)

    many = build(nnx.Rngs(jax.random.split(jax.random.key(0), 3)))
    assert many.to_q.kernel.get_value().shape == (3, C, N * H)
    ys = nnx.jit(nnx.vmap(lambda m, x: m(x), in_axes=(0, None), out_axes=0))(many, X)
    for i in (0, 2):
        np.testing.assert_allclose(ys[i], compiled(one_of(many, i), X), atol=1e-5)


# ---- meshes --------------------------------------------------------------------------------------


def test_parameters_name_their_mesh_axes() -> None:
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(attn())))
    inward = {"kernel": PartitionSpec("fsdp", "tensor"), "bias": PartitionSpec("tensor")}
    assert specs == {
        "to_q": inward, "to_k": inward, "to_v": inward,
        "to_out": {"kernel": PartitionSpec("tensor", "fsdp"), "bias": PartitionSpec(None)},
        "norm_q": {"scale": PartitionSpec("tensor")}, "norm_k": {"scale": PartitionSpec("tensor")},
    }  # fmt: skip


def loss_and_gradients(
    config: AttentionConfig, mesh: jax.sharding.Mesh | None
) -> tuple[Any, nnx.List]:
    modules = nnx.List([attn(config=config, mesh=mesh), cross(config=config, mesh=mesh)])
    sharding.place(modules, mesh)

    @nnx.jit
    @nnx.value_and_grad
    def run(pair: nnx.List, x: jax.Array, text: jax.Array) -> jax.Array:
        y = pair[0](x, ROPE, mask=masks.KeyPadding(jnp.arange(8) + 3))
        return jnp.mean(jnp.square(pair[1](y, text)))

    loss, grad = run(modules, X, TEXT)
    return (loss, nnx.to_pure_dict(grad)), modules


@cache
def on_one_device() -> Any:
    return loss_and_gradients(AttentionConfig(), None)[0]


@pytest.mark.parametrize("axes", [{"context": 8}, {"tensor": 2, "context": 2, "fsdp": 2}], ids=str)
def test_a_mesh_changes_neither_output_nor_gradients(axes: dict[str, int]) -> None:
    config = AttentionConfig(**{f"ici_{axis}_parallelism": n for axis, n in axes.items()})
    mesh = config.make_mesh()
    got, modules = loss_and_gradients(config, mesh)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), got, on_one_device()
    )
    sizes, kernel = dict(mesh.shape), modules[0].to_q.kernel.get_value()
    assert kernel.addressable_shards[0].data.shape == (C // sizes["fsdp"], N * H // sizes["tensor"])


def test_flaxs_own_module_on_a_mesh() -> None:
    config = AttentionConfig(ici_context_parallelism=4, ici_fsdp_parallelism=2)
    fns = attention_fn(config, config.make_mesh()), nnx.dot_product_attention
    how: dict[str, Any] = {"decode": False, "rngs": nnx.Rngs(0)}
    ours, theirs = (nnx.MultiHeadAttention(N, C, attention_fn=fn, **how) for fn in fns)
    nnx.update(ours, nnx.state(theirs))
    np.testing.assert_allclose(compiled(ours, X), compiled(theirs, X), atol=1e-5)


def test_inside_a_shard_map_of_the_users_own() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    graphdef, state = nnx.split(attn(mesh=mesh))
    spec = PartitionSpec(("data", "fsdp"))
    mapped = jax.shard_map(
        lambda state, x: nnx.merge(graphdef, state)(x, ROPE),
        mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec, check_vma=False,
    )  # fmt: skip
    np.testing.assert_allclose(jax.jit(mapped)(state, X), compiled(attn(), X, ROPE), atol=1e-5)
