"""Norm and rotary embedding in one kernel, in modules: where it is used, and where not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import maxattn as ma
from maxattn.jax_private.mesh import auto_mesh
from maxattn.jax_private.triton import takes_triton, triton_there
from maxattn.modules import norm_rope
from maxattn.modules.norm_rope import NormRopePath, NormRopeRow, path, path_here
from maxattn.modules.norm_rope.triton_row import TritonRow
from maxattn.remat import remat_policy
from tests.modules.test_norm_rope import EPS, error

RNG = np.random.default_rng(5)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let modules believe that they are on an NVIDIA GPU, and count the interpreted kernels that
    they then run.
    """
    runs: list[NormRopeRow] = []

    def interpreted(row: NormRopeRow, *args: Any) -> Any:
        runs.append(row)
        assert args[-1] == "triton"
        return norm_rope.norm_rotary(row, *args[:-1], by="interpreted")

    monkeypatch.setattr(path, "triton_there", lambda: True)
    monkeypatch.setattr(path, "_devices", lambda: 1)
    monkeypatch.setattr("maxattn.modules.base.norm_rotary", interpreted)
    with ma.Target.named("NVIDIA H200").assumed():
        yield runs


def module(qk_norm: str | None, mesh: Any = None, policy: Any = "NONE") -> ma.FlaxAttention:
    config = ma.AttentionConfig(attention="dot_product", remat_policy=policy)
    made = ma.FlaxAttention(
        24,
        4,
        2,
        32,
        bias=True,
        qk_norm=qk_norm,
        config=config,
        mesh=mesh,
        rngs=nnx.Rngs(0),
        bias_init=nnx.initializers.normal(),
    )
    for norm in (made.norm_q, made.norm_k):
        if norm is not None and norm.scale is not None:
            norm.scale.set_value(
                jnp.asarray(
                    1 + 0.3 * RNG.standard_normal(norm.scale.get_value().shape), jnp.float32
                )
            )
    return made


X = jnp.asarray(RNG.standard_normal((2, 8, 24)), jnp.float32)
ROTARY = ma.rope_1d(32, 8)


def gradients(module: ma.FlaxAttention) -> Any:
    """Return the loss and its gradients, through a scan over two layers with the module's
    policy.
    """
    graph, state = nnx.split(module)
    assert module.config is not None
    policy = remat_policy(module.config.remat_policy) or jax.checkpoint_policies.everything_saveable

    def loss(state: Any, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(
            lambda s, x: x + nnx.merge(graph, s)(x, rotary_emb=ROTARY), policy=policy
        )
        x, _ = jax.lax.scan(lambda x, _: (layer(state, x), None), x, length=2)
        return jnp.sum(x * x)

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(state, X)


@pytest.mark.parametrize(
    ("qk_norm", "policy"),
    [
        ("rms_norm_across_heads", "NONE"),
        ("rms_norm", "SAVE_ATTENTION_AND_MATMUL"),
        ("zero_centred_rms_norm", "NONE"),
        (None, "FULL"),
    ],
)
def test_modules_give_the_same_with_it(
    qk_norm: str | None, policy: str, on_gpu: list[NormRopeRow]
) -> None:
    built = module(qk_norm, policy=policy)
    got = gradients(built)
    assert {row.heads for row in on_gpu} == {4, 2}
    with ma.Target.named("cpu").assumed():
        want = gradients(built)
    errors = jax.tree.map(error, got, want)

    assert all(e < 2e-5 for e in jax.tree.leaves(errors)), errors


@pytest.mark.parametrize(
    ("qk_norm", "axes"),
    [
        ("rms_norm", {"data": 2, "context": 2, "tensor": 2}),
        pytest.param(
            "zero_centred_rms_norm",
            {"fsdp": 2, "context": 2, "tensor": 2},
            marks=pytest.mark.slow,
        ),
        ("rms_norm_across_heads", {"fsdp": 2, "context": 4}),
    ],
)
def test_on_a_mesh_every_device_takes_its_rows(
    qk_norm: str, axes: dict[str, int], on_gpu: list[NormRopeRow]
) -> None:
    mesh = auto_mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
    graph, state = nnx.split(module(qk_norm, mesh))

    def run(state: Any, x: jax.Array) -> Any:
        return jnp.sum(nnx.merge(graph, state)(x, rotary_emb=ROTARY) ** 2)

    got = jax.jit(jax.value_and_grad(run, (0, 1)))(state, X)
    assert len(on_gpu) == 2
    with ma.Target.named("cpu").assumed():
        want = jax.jit(jax.value_and_grad(run, (0, 1)))(state, X)
    errors = jax.tree.map(error, got, want)
    assert all(e < 2e-5 for e in jax.tree.leaves(errors)), errors


MESH = {"fsdp": 2, "context": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("qk_norm", "axes"),
    [
        ("rms_norm", MESH),
        pytest.param("zero_centred_rms_norm", {}, marks=pytest.mark.slow),
        pytest.param("rms_norm", {}, marks=pytest.mark.slow),
        pytest.param("zero_centred_rms_norm", MESH, marks=pytest.mark.slow),
    ],
)
def test_joint_attention_gives_the_same_with_it(
    qk_norm: str, axes: dict[str, int], on_gpu: list[NormRopeRow]
) -> None:
    """Text and picture each have their kernel for queries, and for keys."""
    devices = np.array(jax.devices()).reshape(tuple(axes.values()))[:8] if axes else None
    mesh = None if devices is None else auto_mesh(devices, tuple(axes))
    config = ma.AttentionConfig(attention="dot_product")
    how: dict[str, Any] = {"kv_heads": 2, "bias": True, "qk_norm": qk_norm, "config": config}
    built = ma.JointAttention(24, 10, 4, dim_head=32, **how, mesh=mesh, rngs=nnx.Rngs(0))
    graph, state = nnx.split(built)
    text, rotary = jnp.asarray(RNG.standard_normal((2, 3, 10)), jnp.float32), ma.rope_1d(32, 11)

    def loss(state: Any, x: jax.Array, text: jax.Array) -> Any:
        both = nnx.merge(graph, state)(x, text, rotary_emb=rotary)
        return sum(jnp.sum(jnp.sin(part)) for part in both)

    got = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(state, X, text)
    assert sorted(row.heads for row in on_gpu) == [2, 2, 4, 4]
    with ma.Target.named("cpu").assumed():
        want = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(state, X, text)
    errors = jax.tree.map(error, got, want)
    assert all(e < 2e-5 for e in jax.tree.leaves(errors)), errors


def test_where_it_is_not_used(on_gpu: list[NormRopeRow]) -> None:
    mesh = auto_mesh(np.array(jax.devices()[:2]), ("tensor",))
    row = norm_rope.fused_row(
        "rms_norm_across_heads", module("rms_norm_across_heads").norm_q, ROTARY, 4, 32
    )
    by_token = auto_mesh(np.array(jax.devices()), ("context",))
    assert row is not None
    assert path_here(row, X, None) == path_here(row, X, by_token) == NormRopePath("triton")
    assert "heads of several devices" in path_here(row, X, mesh).because
    assert "this is int32" in path_here(row, X.astype(jnp.int32), None).because
    assert "axis T does not divide" in path_here(row, X[:, :7], by_token).because
    assert "RMS norms" in path_here(None, X, None).because
    with ma.Target.named("TPU v5p").assumed():
        assert path_here(row, X, None) == NormRopePath("xla")
    assert norm_rope.fused_row("layer_norm", module("layer_norm").norm_q, ROTARY, 4, 32) is None
    assert norm_rope.fused_row(None, None, None, 4, 32) is None
    of_heads = ma.Rotary(*np.ones((2, 1, 8, 4, 16), np.float32))
    of_a_part = ma.Rotary(*np.ones((2, 8, 12), np.float32), partial=True)
    assert norm_rope.fused_row(None, None, of_heads, 4, 32) is None
    assert norm_rope.fused_row(None, None, of_a_part, 4, 32) is None

    class Doubled(nnx.RMSNorm):
        pass

    assert norm_rope.fused_row("rms_norm", Doubled(32, rngs=nnx.Rngs(0)), ROTARY, 4, 32) is None


WIDE, ODD = NormRopeRow(30, 64, "across", EPS, "half"), NormRopeRow(4, 72, "head", EPS, "half")
FA4 = (("fa4-jax", "0.1.0"),)


@pytest.mark.parametrize("row", [WIDE, ODD], ids=["wide", "no_power_of_two"])
@pytest.mark.parametrize("capability", ["9.0", "7.5"])
def test_cute_takes_rows_that_triton_does_not(
    row: NormRopeRow, capability: str, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fa4-jax, on a GPU that such kernels are compiled for."""

    class Gpu:
        compute_capability = capability

    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
    found = path_here(row, X, None)
    assert not found.is_kernel and f"rows of {row.heads} x {row.head_dim}" in found.because
    with ma.Target.named("NVIDIA H200", FA4).assumed():
        assert path_here(row, X, None).name == ("cute" if capability == "9.0" else "xla")
    with ma.Target.named("NVIDIA H200", (("fa4-jax", "0.2.0"),)).assumed():
        assert path_here(row, X, None).name == "xla"  # a version that was not tested


@pytest.mark.parametrize(
    ("kind", "dtype", "name"),
    [
        ("NVIDIA H200", jnp.bfloat16, "cute"),
        ("NVIDIA H200", jnp.float32, "triton"),
        ("NVIDIA A100", jnp.bfloat16, "triton"),
    ],
)
def test_the_faster_of_two_kernels_runs(kind: str, dtype: Any, name: str, on_gpu: Any) -> None:
    row = NormRopeRow(12, 128, "across", EPS, "interleaved")
    with ma.Target.named(kind, FA4).assumed():
        assert path_here(row, X.astype(dtype), None) == NormRopePath(name)


def test_cute_takes_over_where_triton_is_gone(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "triton_there", lambda: False)
    row = NormRopeRow(12, 128, "across", EPS, "interleaved")
    assert path_here(row, X, None).name == "xla"
    with ma.Target.named("NVIDIA H200", FA4).assumed():
        assert path_here(row, X, None) == NormRopePath("cute")


def test_the_plan_says_which_path_runs(on_gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="maxattn"):
        module("rms_norm")(X, rotary_emb=ROTARY)
        module("layer_norm")(X, rotary_emb=ROTARY)
    fused, steps = (record.message for record in caplog.records)
    assert "norm and rotary embedding in one kernel, written in Pallas for Triton" in fused
    assert "norm and rotary embedding by XLA, step by step: the kernels take RMS norms" in steps


def test_without_a_mesh_on_several_devices_xla_does_it(
    on_gpu: list[NormRopeRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs may be spread over them: XLA would gather what the kernel reads."""
    one = module("rms_norm", ma.AttentionConfig().make_mesh(jax.devices()[:1]))
    monkeypatch.setattr(path, "_devices", lambda: 2)
    module("rms_norm")(X, rotary_emb=ROTARY)
    assert not on_gpu
    one(X, rotary_emb=ROTARY)
    assert len(on_gpu) == 2


@pytest.mark.parametrize(
    ("heads", "head_dim", "fits"),
    [(12, 128, True), (40, 128, True), (30, 64, False), (25, 128, False)],
)
def test_rows_that_leave_too_much_to_a_thread_are_left(
    heads: int, head_dim: int, fits: bool
) -> None:
    assert TritonRow(heads, head_dim, "across", EPS, "interleaved").fits() == fits


def test_gpus_that_triton_is_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"7.5": False, "8.0": True, "9.0": True, "12.0": True, "gfx942": False, None: True}
    assert {capability: takes_triton(capability) for capability in taken} == taken

    class T4:
        compute_capability = "7.5"

    monkeypatch.setattr(jax, "local_devices", lambda: [T4()])
    assert not triton_there()


@pytest.mark.parametrize(("checked", "kernels"), [(True, 0), (False, 2)])
def test_a_shard_map_that_checks_what_varies_goes_without(
    checked: bool, kernels: int, on_gpu: list[NormRopeRow]
) -> None:
    mesh = auto_mesh(np.array(jax.devices()[:2]), ("model",))
    graph, state = nnx.split(module("rms_norm"))
    both = jax.tree.map(lambda a: jnp.stack((a, 2 * a)), state)

    def layer(
        states: Any, x: jax.Array
    ) -> jax.Array:  # x is the same on both devices, and the parameters are not
        return nnx.merge(graph, jax.tree.map(lambda a: a[0], states))(x, rotary_emb=ROTARY)[None]

    places = {
        "in_specs": (PartitionSpec("model"), PartitionSpec()),
        "out_specs": PartitionSpec("model"),
    }
    got = jax.jit(jax.shard_map(layer, mesh=mesh, check_vma=checked, **places))(both, X)
    assert len(on_gpu) == kernels
    with ma.Target.named("cpu").assumed():
        want = nnx.merge(graph, jax.tree.map(lambda a: a[1], both))(X, rotary_emb=ROTARY)
    assert error(got[1], want) < 1e-5


def test_queries_and_keys_of_other_kinds_are_no_pair() -> None:
    x, row = jnp.zeros((1, 4, 64)), NormRopeRow(2, 32, "head", EPS, "interleaved")
    norm, rotary = nnx.RMSNorm(32, rngs=nnx.Rngs(0)), ma.rope_1d(32, 4)
    queries = norm_rope.Sequence(row, x, None, norm, rotary)
    for other in (
        queries._replace(rotary=ma.rope_1d(32, 4)),
        queries._replace(bias=jnp.zeros(64)),
        queries._replace(
            row=NormRopeRow(1, 64, "head", EPS, "interleaved"), norm=None, rotary=None
        ),
    ):
        assert norm_rope.norm_rotary_pair(queries, other) is None
