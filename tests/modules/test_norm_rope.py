"""Norm and rotary embedding in one kernel, in modules: when it runs, and the code around it.

XLA's steps replace the kernel here; tests/modules/row_kernel tests the kernel itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import maxattn as ma
from maxattn._remat import remat_policy
from maxattn.jax_private.mesh import auto_mesh
from maxattn.modules.norm_rope import NormRope, decide, in_steps
from maxattn.modules.row_kernel import call
from maxattn.modules.row_kernel.work import RowWork
from tests.closeness import distance
from tests.modules.reference import compiled
from tests.waiting import but

RNG = np.random.default_rng(5)
FA4 = (("fa4-jax", "0.1.0"), ("nvidia-cutlass-dsl", "4.8.1"))
H200 = ma.Target.named("NVIDIA H200", FA4)
DENSE = ma.AttentionConfig(attention="dot_product")


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


X, ROTARY = normal(2, 8, 24), ma.rope_1d(32, 8)


def by_xla(work: RowWork, x: Any, parts: Any, tables: Any) -> Any:
    """Compute rows [B, T, N H] by XLA, in place of the kernel."""
    b, t, _ = x.shape
    names = [name for name, _ in work.vectors]
    vectors = {n: v.reshape(-1, work.head_dim) for n, v in zip(names, parts, strict=True)}
    angles = tuple(a.reshape(-1, t, a.shape[-1]) for a in tables)
    heads = x.reshape(b, t, work.heads, work.head_dim)
    return in_steps(work, heads, vectors, angles).reshape(x.shape)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to run on one H200, and record the heads of each kernel call."""
    found: list[int] = []

    def norm_rows(launch: Any, rows: Any, parts: Any, tables: Any) -> Any:
        found.append(launch.work.heads)
        return [by_xla(launch.work, rows[0], parts, tables)]

    monkeypatch.setattr(call, "norm_rows", norm_rows)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with H200.assumed():
        yield found


def module(qk_norm: str | None, mesh: Any = None) -> ma.FlaxAttention:
    made = ma.FlaxAttention(
        24, 4, 2, 32, bias=True, qk_norm=qk_norm, config=DENSE, mesh=mesh, rngs=nnx.Rngs(0),
        bias_init=nnx.initializers.normal(),
    )  # fmt: skip
    for norm in (made.norm_q, made.norm_k):
        if norm is not None and norm.scale is not None:
            norm.scale.set_value(1 + 0.3 * normal(*norm.scale.get_value().shape))
    return made


def same_as_by_xla(run: Any, *of: Any) -> None:
    """Compare outputs and gradients with those of XLA without the kernel."""

    def loss(*of: Any) -> Any:
        out = run(*of)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out)), out

    def both() -> Any:
        grad = jax.value_and_grad(loss, tuple(range(len(of))), has_aux=True)
        return jax.jit(grad)(*of)

    got = both()
    with ma.Target.named("cpu").assumed():
        want = both()
    errors = jax.tree.map(distance, got, want)
    assert all(e < 2e-5 for e in jax.tree.leaves(errors)), errors


# ---- results and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("qk_norm", "policy"),
    [("rms_norm_across_heads", "SAVE_ATTENTION_AND_MATMUL"), ("zero_centred_rms_norm", "FULL")],
)
def test_modules_give_the_same_with_it(qk_norm: str | None, policy: Any, runs: Any) -> None:
    """Through a scan over two layers with remat."""
    graph, state = nnx.split(module(qk_norm))

    def layers(state: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> Any:
            return x + nnx.merge(graph, state)(x, rotary_emb=ROTARY), None

        return jax.lax.scan(jax.checkpoint(layer, policy=remat_policy(policy)), x, length=2)[0]

    same_as_by_xla(layers, state, X)
    assert set(runs) == {4, 2}


@pytest.mark.parametrize(
    ("qk_norm", "axes"),
    [
        ("rms_norm", {"data": 2, "context": 2, "tensor": 2}),
        ("rms_norm_across_heads", {"fsdp": 2, "context": 4}),
    ],
)
def test_on_a_mesh_every_device_takes_its_rows(qk_norm: str, axes: dict[str, int], runs: Any):
    mesh = auto_mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
    graph, state = nnx.split(module(qk_norm, mesh))
    same_as_by_xla(lambda s, x: nnx.merge(graph, s)(x, rotary_emb=ROTARY), state, X)
    assert sorted(runs) == [2 // axes.get("tensor", 1), 4 // axes.get("tensor", 1)]


@pytest.mark.parametrize("axes", but([{"fsdp": 2, "context": 2, "tensor": 2}, {}], [{}]), ids=str)
def test_joint_attention_gives_the_same_with_it(axes: dict[str, int], runs: Any) -> None:
    devices = np.array(jax.devices()).reshape(tuple(axes.values())) if axes else None
    mesh = None if devices is None else auto_mesh(devices, tuple(axes))
    how: dict[str, Any] = {"kv_heads": 2, "bias": True, "qk_norm": "rms_norm", "config": DENSE}
    built = ma.JointAttention(24, 10, 4, dim_head=32, **how, mesh=mesh, rngs=nnx.Rngs(0))
    (graph, state), text, rotary = nnx.split(built), normal(2, 3, 10), ma.rope_1d(32, 11)
    same_as_by_xla(lambda s, *of: nnx.merge(graph, s)(*of, rotary_emb=rotary), state, X, text)
    assert len(runs) == 4


# ---- where it runs -------------------------------------------------------------------------------


def decided(
    x: Any = X, qk_norm: str | None = "rms_norm", norm: Any = None, rotary: Any = ROTARY,
    mesh: Any = None, target: ma.Target = H200, heads: int = 4,
) -> NormRope:  # fmt: skip
    built = module(qk_norm).norm_q if norm is None and qk_norm else norm
    return decide(target, x, qk_norm, built, rotary, heads, 32, mesh)


def test_where_it_runs(runs: Any) -> None:
    by_token = auto_mesh(np.array(jax.devices()), ("context",))
    by_head = auto_mesh(np.array(jax.devices()[:2]), ("tensor",))
    gpus = (ma.Target.named(name, FA4) for name in ("NVIDIA A100", "NVIDIA B200"))
    for how in (*({"target": gpu} for gpu in gpus), {"mesh": by_token}, {}):
        assert decided(**how).work is not None
    work = decided(mesh=by_head).work
    assert work is not None and work.heads == 2
    assert decided(target=ma.Target.named("cpu")) == NormRope()
    assert decided(qk_norm=None, rotary=None) == NormRope()


class Doubled(nnx.RMSNorm):
    """A user's norm."""


BY_HEAD, BY_TOKEN = (("tensor", 2), ("context", 8))
TAKES = "the kernel needs an RMS norm"
LEFT_TO_XLA: dict[str, tuple[dict[str, Any], str]] = {
    "layer_norm": ({"qk_norm": "layer_norm"}, TAKES),
    "another_class": ({"norm": Doubled(32, rngs=nnx.Rngs(0))}, TAKES),
    "angles_of_heads": ({"rotary": ma.Rotary(*np.ones((2, 1, 8, 4, 16), "f"))}, TAKES),
    "part_of_a_head": ({"rotary": ma.Rotary(*np.ones((2, 8, 12), "f"), partial=True)}, TAKES),
    "heads_of_devices": (
        {"qk_norm": "rms_norm_across_heads", "mesh": BY_HEAD}, "which are split over devices"
    ),
    "dtype": ({"x": X.astype(jnp.int32)}, "x is int32"),
    "odd_tokens": ({"x": X[:, :7], "mesh": BY_TOKEN}, "axis T does not divide"),
    "many_heads": ({"heads": 500}, "cannot take 500 heads of dim 32"),
    "no_package": ({"target": ma.Target("gpu", "NVIDIA H200")}, "fa4-jax is not installed"),
    "untested_fa4": (
        {"target": ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.2.0"),))}, "not with 0.2.0"
    ),
    "untested_cute": (
        {"target": ma.Target("gpu", "NVIDIA H200", (FA4[0], ("nvidia-cutlass-dsl", "5.0")))},
        "was tested with >=4.8,<4.9, not with 5.0",
    ),
    "old_gpu": ({"target": ma.Target("gpu", "NVIDIA X", FA4, capability="7.5")}, "no kernels for"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_TO_XLA)
def test_what_is_left_to_xla_has_a_reason(name: str, runs: Any) -> None:
    how, reason = LEFT_TO_XLA[name]
    if "mesh" in how:
        axis, n = how["mesh"]
        how = how | {"mesh": auto_mesh(np.array(jax.devices()[:n]), (axis,))}
    found = decided(**how)
    assert found.work is None and reason in found.reason


def test_the_plan_prints_it(runs: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="maxattn"):
        for qk_norm in ("rms_norm", "layer_norm"):
            jax.eval_shape(lambda norm=qk_norm: module(norm)(X, rotary_emb=ROTARY))
    fused, steps = (record.message for record in caplog.records)
    assert "norm and rotary embedding in one kernel, written in CuTe: 32 threads" in fused
    assert "norm and rotary embedding by XLA, step by step: the kernel needs an RMS norm" in steps


def test_without_a_mesh_on_several_devices_xla_does_it(runs: Any, monkeypatch: pytest.MonkeyPatch):
    """Inputs may be split over devices, and XLA would gather them for the kernel."""
    mesh = ma.AttentionConfig().make_mesh(jax.devices()[:1])
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert "the module has no mesh=" in decided().reason
    assert decided(mesh=mesh).work is not None


@pytest.mark.parametrize("checked", [True, False])
def test_a_shard_map_that_checks_what_varies_goes_without(checked: bool, runs: Any) -> None:
    mesh, spec = auto_mesh(np.array(jax.devices()[:2]), ("model",)), PartitionSpec("model")
    attn = module("rms_norm")
    run = jax.shard_map(
        lambda x: attn(x, rotary_emb=ROTARY),
        mesh=mesh, in_specs=spec, out_specs=spec, check_vma=checked,
    )  # fmt: skip
    got = jax.jit(run)(X)
    assert len(runs) == (0 if checked else 2)
    with ma.Target.named("cpu").assumed():
        assert distance(got, compiled(attn, X, rotary_emb=ROTARY)) < 1e-5
