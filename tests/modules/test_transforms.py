"""The modules under jit, vmap, scan, remat and on meshes; their state and static parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import maxattn as ma
from maxattn import call as calls
from maxattn import masks, sharding
from maxattn.config import AttentionConfig
from maxattn.modules import CrossAttention, FlaxAttention
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


def test_saved_on_one_mesh_loads_on_another(tmp_path: Path) -> None:
    configs = (AttentionConfig(ici_data_parallelism=2, ici_tensor_parallelism=4),
               AttentionConfig(ici_tensor_parallelism=2, ici_fsdp_parallelism=4))  # fmt: skip
    old_mesh, mesh = (config.make_mesh() for config in configs)
    old, new = (attn(config=c, mesh=m) for c, m in zip(configs, (old_mesh, mesh), strict=True))
    for _, param in nnx.to_flat_state(nnx.state(new, nnx.Param)):
        param.set_value(param.get_value() + 1)
    sharding.place(old, old_mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.to_pure_dict(nnx.state(old)))
        checkpointer.wait_until_finished()
        state = nnx.state(new)
        abstract = jax.tree.map(
            lambda v, s: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s),
            nnx.to_pure_dict(state),
            nnx.to_pure_dict(sharding.parameter_shardings(state, mesh)),
        )
        nnx.replace_by_pure_dict(state, checkpointer.restore(tmp_path / "model", abstract))
    nnx.update(new, state)
    kernel = new.to_q.kernel.get_value()
    assert kernel.sharding.shard_shape(kernel.shape) == (C // 4, N * H // 2)
    np.testing.assert_array_equal(kernel, old.to_q.kernel.get_value())
    got, want = (compiled(m, X, ROPE) for m in (new, old))
    np.testing.assert_allclose(got, want, atol=1e-5)


# ---- one bind and one check ----------------------------------------------------------------------

DENSE = ma.AttentionConfig(attention="dot_product")
HOW: dict[str, Any] = {"heads": 2, "dim_head": 8, "config": DENSE, "rngs": nnx.Rngs(0)}
Y, HEADS = np.ones((2, 6, 16), "f"), jnp.ones((2, 6, 2, 8))
CROSS = ma.CrossAttention(16, **HOW)
MASK, LONGER = masks.Dense(np.ones((6, 6), bool)), masks.Dense(np.ones((12, 12), bool))

CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: ma.attention(HEADS, HEADS, HEADS, MASK, config=DENSE),
    "self": lambda: ma.FlaxAttention(16, **HOW)(Y, mask=MASK),
    "cross": lambda: CROSS(Y, Y, mask=MASK),
    "cross with kv": lambda: CROSS(Y, kv=CROSS.compute_kv(jnp.asarray(Y)), mask=MASK),
    "joint": lambda: ma.JointAttention(16, **HOW)(Y, Y, mask=LONGER),
    "nnx": lambda: ma.attention_fn(DENSE)(HEADS, HEADS, HEADS, mask=MASK.table),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_bind_and_one_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[str] = Counter()

    def counted(owner: Any, method: str) -> None:
        plain = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *of: (found.update([method]), plain(*of))[1])

    counted(masks.Dense, "bind")
    counted(calls, "check_operands")
    CALLS[name]()
    assert found == {"bind": 1, "check_operands": 1}
