"""Norm and rotary embedding in one kernel, in modules: where it runs, and what is around it. Its
place is taken by the same steps of XLA; tests/modules/row_kernel has the kernel itself.
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
from maxattn.jax_private.mesh import auto_mesh
from maxattn.modules.norm_rope import NormRope, decide, in_steps, on_shard
from maxattn.modules.row_kernel import call
from maxattn.modules.row_kernel.work import RowWork
from maxattn.remat import remat_policy
from tests.modules.row_kernel.test_row_kernel import error

RNG = np.random.default_rng(5)
FA4 = (("fa4-jax", "0.1.0"), ("nvidia-cutlass-dsl", "4.8.1"))
H200 = ma.Target.named("NVIDIA H200", FA4)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


X, ROTARY = normal(2, 8, 24), ma.rope_1d(32, 8)


def by_xla(work: RowWork, x: Any, parts: Any, tables: Any) -> Any:
    """Compute rows [B, T, N H] as the kernel does."""
    b, t, _ = x.shape
    names = [name for name, _ in work.vectors]
    vectors = {n: v.reshape(-1, work.head_dim) for n, v in zip(names, parts, strict=True)}
    angles = tuple(a.reshape(-1, t, a.shape[-1]) for a in tables)
    heads = x.reshape(b, t, work.heads, work.head_dim)
    return in_steps(work, heads, vectors, angles).reshape(x.shape)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let modules run as if on one H200, and list the heads of each call of the kernel."""
    found: list[int] = []

    def forward(launch: Any, rows: Any, parts: Any, tables: Any, keep: bool = False) -> Any:
        found.append(launch.work.heads)
        kept = [jnp.ones(rows[0].shape[:2]).reshape(-1)] * (keep and launch.work.norm == "across")
        return [by_xla(launch.work, rows[0], parts, tables), *kept]

    def backward(launch: Any, dy: Any, x: Any, kept: Any, parts: Any, tables: Any) -> Any:
        assert len(kept) == (launch.work.norm == "across")
        shape = launch.work.heads, launch.work.head_dim
        full = (
            jnp.broadcast_to(v.reshape(-1, shape[1]), shape).reshape(1, 1, 1, -1) for v in parts
        )
        _, pull = jax.vjp(lambda x, *v: by_xla(launch.work, x, v, tables), x, *full)
        dx, *sums = pull(dy)
        return dx, [each.reshape(-1).astype(jnp.float32) for each in sums]

    monkeypatch.setattr(call, "forward", forward)
    monkeypatch.setattr(call, "backward", backward)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with H200.assumed():
        yield found


def module(qk_norm: str | None, mesh: Any = None, policy: Any = "NONE") -> ma.FlaxAttention:
    config = ma.AttentionConfig(attention="dot_product", remat_policy=policy)
    made = ma.FlaxAttention(
        24, 4, 2, 32, bias=True, qk_norm=qk_norm, config=config, mesh=mesh, rngs=nnx.Rngs(0),
        bias_init=nnx.initializers.normal(),
    )  # fmt: skip
    for norm in (made.norm_q, made.norm_k):
        if norm is not None and norm.scale is not None:
            norm.scale.set_value(1 + 0.3 * normal(*norm.scale.get_value().shape))
    return made


def same_as_by_xla(run: Any, *of: Any, limit: float = 2e-5) -> None:
    """Compare a function of modules with what XLA gives without the kernel."""
    got = run(*of)
    with ma.Target.named("cpu").assumed():
        want = run(*of)
    errors = jax.tree.map(error, got, want)
    assert all(e < limit for e in jax.tree.leaves(errors)), errors


# ---- results and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("qk_norm", "policy"),
    [
        ("rms_norm_across_heads", "NONE"),
        ("rms_norm", "SAVE_ATTENTION_AND_MATMUL"),
        ("zero_centred_rms_norm", "NONE"),
        (None, "FULL"),
    ],
)
def test_modules_give_the_same_with_it(qk_norm: str | None, policy: str, runs: Any) -> None:
    """Through a scan over two layers with the module's policy."""
    graph, state = nnx.split(module(qk_norm, policy=policy))
    saved = remat_policy(policy) or jax.checkpoint_policies.everything_saveable

    def loss(state: Any, x: jax.Array) -> jax.Array:
        def layer(state: Any, x: jax.Array) -> jax.Array:
            return x + nnx.merge(graph, state)(x, rotary_emb=ROTARY)

        one = jax.checkpoint(layer, policy=saved)
        x, _ = jax.lax.scan(lambda x, _: (one(state, x), None), x, length=2)
        return jnp.sum(x * x)

    same_as_by_xla(lambda *of: jax.jit(jax.value_and_grad(loss, (0, 1)))(*of), state, X)
    assert set(runs) == {4, 2}


@pytest.mark.parametrize(
    ("qk_norm", "axes"),
    [
        ("rms_norm", {"data": 2, "context": 2, "tensor": 2}),
        ("rms_norm_across_heads", {"fsdp": 2, "context": 4}),
    ],
)
def test_on_a_mesh_every_device_takes_its_rows(
    qk_norm: str, axes: dict[str, int], runs: Any
) -> None:
    mesh = auto_mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
    graph, state = nnx.split(module(qk_norm, mesh))

    def loss(state: Any, x: jax.Array) -> Any:
        return jnp.sum(nnx.merge(graph, state)(x, rotary_emb=ROTARY) ** 2)

    same_as_by_xla(lambda *of: jax.jit(jax.value_and_grad(loss, (0, 1)))(*of), state, X)
    assert sorted(runs) == [2 // axes.get("tensor", 1), 4 // axes.get("tensor", 1)]


@pytest.mark.parametrize(
    ("qk_norm", "axes"),
    [
        ("rms_norm", {"fsdp": 2, "context": 2, "tensor": 2}),
        ("rms_norm", {}),
        pytest.param("zero_centred_rms_norm", {}, marks=pytest.mark.slow),
    ],
)
def test_joint_attention_gives_the_same_with_it(
    qk_norm: str, axes: dict[str, int], runs: Any
) -> None:
    devices = np.array(jax.devices()).reshape(tuple(axes.values())) if axes else None
    mesh = None if devices is None else auto_mesh(devices, tuple(axes))
    config = ma.AttentionConfig(attention="dot_product")
    how: dict[str, Any] = {"kv_heads": 2, "bias": True, "qk_norm": qk_norm, "config": config}
    built = ma.JointAttention(24, 10, 4, dim_head=32, **how, mesh=mesh, rngs=nnx.Rngs(0))
    (graph, state), text, rotary = nnx.split(built), normal(2, 3, 10), ma.rope_1d(32, 11)

    def both(state: Any, x: jax.Array, text: jax.Array) -> Any:
        return nnx.merge(graph, state)(x, text, rotary_emb=rotary)

    def loss(*of: Any) -> Any:
        return sum(jnp.sum(jnp.sin(part)) for part in both(*of))

    def run(*of: Any) -> Any:
        return jax.jit(both)(*of), jax.jit(jax.grad(loss, (0, 1, 2)))(*of)

    same_as_by_xla(run, state, X, text)
    assert runs


@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_gradients_have_the_dtypes_of_what_is_learned(style: str, runs: Any) -> None:
    """Of a scale that all heads share, too, and of angles."""
    work = RowWork(4, 32, "head", 1e-6, style)
    how = NormRope(work, 132, 227 * 2**10)
    vectors = {"bias": normal(4, 32).astype(jnp.bfloat16), "scale": normal(1, 32)}
    tables = tuple(jnp.asarray(a, jnp.float32)[None] for a in (ROTARY.cos, ROTARY.sin))
    x, dy = normal(2, 8, 4, 32), normal(2, 8, 4, 32)
    _, pull = jax.vjp(lambda *of: on_shard(how, *of), x, vectors, tables)
    _, exact = jax.vjp(lambda *of: in_steps(work, *of), x, vectors, tables)
    got, want = pull(dy), exact(dy)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(
        lambda a: (a.shape, a.dtype), want
    )
    errors = jax.tree.leaves(jax.tree.map(error, got, want))
    assert max(errors) < 4e-3 and sorted(errors)[-2] < 1e-5


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
    assert decided().work is not None and decided(mesh=by_token).work is not None
    work = decided(mesh=by_head).work
    assert work is not None and work.heads == 2
    for target in ("NVIDIA A100", "NVIDIA B200"):
        assert decided(target=ma.Target.named(target, FA4)).work is not None
    across = {"qk_norm": "rms_norm_across_heads", "mesh": by_head}
    assert "heads of several devices" in decided(**across).reason
    assert "this is int32" in decided(X.astype(jnp.int32)).reason
    assert "axis T does not divide" in decided(X[:, :7], mesh=by_token).reason
    assert "no rows of 500 x 32" in decided(heads=500).reason
    for target in (ma.Target.named("TPU v5p"), ma.Target.named("cpu")):
        assert decided(target=target) == NormRope()
    assert decided(qk_norm=None, rotary=None) == NormRope()


def test_norms_and_angles_of_other_kinds_are_left_to_xla() -> None:
    class Doubled(nnx.RMSNorm):
        pass

    of_heads = ma.Rotary(*np.ones((2, 1, 8, 4, 16), np.float32))
    of_a_part = ma.Rotary(*np.ones((2, 8, 12), np.float32), partial=True)
    own = Doubled(32, rngs=nnx.Rngs(0))
    others = [{"qk_norm": "layer_norm"}, {"rotary": of_heads}, {"rotary": of_a_part}, {"norm": own}]
    for other in others:
        assert "the kernel takes RMS norms" in decided(**other).reason


@pytest.mark.parametrize(
    ("packages", "capability", "reason"),
    [
        ((), "", "fa4-jax is not installed"),
        ((("fa4-jax", "0.2.0"),), "", "this is 0.2.0"),
        (
            (FA4[0], ("nvidia-cutlass-dsl", "5.0")),
            "",
            "was tested with >=4.8,<4.9, and this is 5.0",
        ),
        (FA4, "7.5", "no kernels for"),
    ],
)
def test_what_it_needs(packages: Any, capability: str, reason: str, runs: Any) -> None:
    kind = "NVIDIA H200" if not capability else "NVIDIA X"
    target = ma.Target("gpu", kind, packages, capability=capability)
    assert reason in decided(target=target).reason


def test_the_plan_prints_it(runs: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="maxattn"):
        module("rms_norm")(X, rotary_emb=ROTARY)
        module("layer_norm")(X, rotary_emb=ROTARY)
    fused, steps = (record.message for record in caplog.records)
    assert "norm and rotary embedding in one kernel, written in CuTe: 32 threads" in fused
    assert "norm and rotary embedding by XLA, step by step: the kernel takes RMS norms" in steps


def test_without_a_mesh_on_several_devices_xla_does_it(
    runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs may be spread over them: XLA would gather what the kernel reads."""
    one = module("rms_norm", ma.AttentionConfig().make_mesh(jax.devices()[:1]))
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    module("rms_norm")(X, rotary_emb=ROTARY)
    assert not runs
    one(X, rotary_emb=ROTARY)
    assert len(runs) == 2


@pytest.mark.parametrize(("checked", "kernels"), [(True, 0), (False, 2)])
def test_a_shard_map_that_checks_what_varies_goes_without(
    checked: bool, kernels: int, runs: Any
) -> None:
    mesh = auto_mesh(np.array(jax.devices()[:2]), ("model",))
    graph, state = nnx.split(module("rms_norm"))
    both = jax.tree.map(lambda a: jnp.stack((a, 2 * a)), state)

    def layer(states: Any, x: jax.Array) -> jax.Array:
        # x is the same on both devices, and the parameters are not.
        return nnx.merge(graph, jax.tree.map(lambda a: a[0], states))(x, rotary_emb=ROTARY)[None]

    split, whole = PartitionSpec("model"), PartitionSpec()
    run = jax.shard_map(
        layer, mesh=mesh, check_vma=checked, in_specs=(split, whole), out_specs=split
    )
    got = jax.jit(run)(both, X)
    assert len(runs) == kernels
    with ma.Target.named("cpu").assumed():
        want = nnx.merge(graph, jax.tree.map(lambda a: a[1], both))(X, rotary_emb=ROTARY)
    assert error(got[1], want) < 1e-5
