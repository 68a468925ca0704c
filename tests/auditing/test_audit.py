"""`ma.audit` finds every attention call, names unsafe layers, and leaves the model unchanged."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import maxattn as ma
from maxattn.auditing import KernelAudit, LayerAudit, grid_of_table, trace
from maxattn.auditing.unsafe import findings
from maxattn.errors import InputError, MaxattnError
from maxattn.kernels import table
from tests.auditing import models
from tests.auditing.models import Stack, angles, faulty, states, with_bad_value
from tests.golden_text import check_golden, check_refused

quick = partial(ma.audit, kernels=(), seconds=0)
X = jax.random.normal(jax.random.key(0), (1, 64, 2, 16))


@cache
def of_stack(runs: str = "nnx.scan") -> ma.Audit:
    return quick(Stack(runs), states(), angles())


@cache
def of_bad_value(bad: float) -> ma.Audit:
    return quick(with_bad_value(bad), states(), angles())


def same(found: ma.Audit, other: ma.Audit) -> None:
    for a, b in zip(found.layers, other.layers, strict=True):
        for name in set(b.measures) - {"k_channel"}:
            np.testing.assert_allclose(a.measures[name], b.measures[name], 2e-3, 2e-4, name)


# ---- planted faults ------------------------------------------------------------------------------


def test_planted_faults_are_named():
    found = quick(faulty(), states(), angles()).findings
    of = {kind: [(x.layer[-2], x.heads) for x in found if x.kind == kind] for kind in KINDS}
    assert of["offset"] == [("1", (3,))] and of["dominant"] == [("2", (1,))]
    assert of["bound"] == [("2", (1,)), ("3", (0, 1, 2, 3))]
    assert of["norms"] == [("2", ()), ("3", ())]
    assert [x.why[:10] for x in found if x.kind == "norms"] == ["norms of q", "norms of k"]
    offset = next(x.why for x in found if x.kind == "offset")
    assert "half rotary" in offset and "8 bits would lose" in offset
    assert {x.layer for x in found} == {f"blocks.attn[{i}]" for i in (1, 2, 3)}


KINDS = ("offset", "dominant", "bound", "norms")
SOUND = {"score": 5.5, "bound": 9.0, "outside": 0.0, "limit": 65.2, "q_norm": 6.0, "k_norm": 7.0}
SOUND |= {"k_offset": 0.2, "k_channel": 2.0, "k_outlier": 1.4, "entropy": 4.5, "top_tiles": 0.4}
SOUND |= {"int8": 0.012, "int8_centred": 0.011, "bad_q": 0.0, "bad_k": 0.0, "bad_v": 0.0}
FAULTS = (
    {},
    {"k_offset": 10.2, "int8": 0.34, "int8_centred": 0.012},
    {"k_outlier": 31.0, "int8_centred": 0.081},
    {"score": 3e4, "bound": 5e4, "outside": 0.875, "entropy": 0.01},
    {"q_norm": 900.0, "error flash": 0.2},
    {"bad_q": 3.0, "bad_v": 1.0},
)


def test_what_is_said_of_each_fault():
    call, layers = "B=1 T=S=4096 N=3 H=64 bf16", []
    for i, fault in enumerate(FAULTS):
        usual = SOUND | {"error flash": 0.003}
        heads = {n: (x, fault.get(n, x), x) for n, x in usual.items()}
        facts = call, "self", "flash", "bfloat16", "half", (0, 4, 7)
        layers.append(LayerAudit(f"blocks.{i}.attn", *facts, heads))
    without_8_bits = {n: x for n, x in layers[1].measures.items() if "int8" not in n}
    layers.append(replace(layers[1], name="blocks.6.attn", measures=without_8_bits))
    row = KernelAudit(call, "flash", True, 0.2, "blocks.4.attn, head 4", 1.25, 2**20)
    kernels = row, KernelAudit(call, "cudnn", False, note="it takes no such mask")
    found = ma.Audit("cpu", "64 queries", "", tuple(layers), kernels, findings(layers))
    check_golden("audit/findings", str(found))
    lines = found.table(by_head=True).splitlines()
    check_golden("audit/by_head", "\n".join(lines[:6]))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_named(bad):
    first = of_bad_value(bad).findings[0]
    assert (first.kind, first.layer, first.heads) == ("non-finite", "blocks.attn[2]", (1,))
    assert f"{2 * models.TOKENS} in v" in first.why


# ---- where calls are -----------------------------------------------------------------------------


@pytest.mark.parametrize("runs", ["nnx.scan", "lax.scan"])
def test_scanned_layers_are_measured_as_a_loop_s(runs):
    loop, found = of_stack("loop"), of_stack(runs)
    same(found, loop)
    assert not found.findings and "unsafe: nothing was found" in str(found)
    assert [layer.name for layer in found.layers] == [f"blocks.attn[{i}]" for i in range(4)]
    assert [layer.name for layer in loop.layers[:2]] == ["blocks.attn", "blocks.attn (2)"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        spread = jax.device_put(states(), NamedSharding(mesh, PartitionSpec("data")))
        how = {"kernels": ["dot_product"], "seconds": 0.01, "grid": models.GRID}
        found = ma.audit(Stack(), spread, angles(), **how)
    same(found, of_stack())
    assert found.kernels[0].is_planned and found.kernels[0].error < 1e-5
    assert found.kernels[0].ms > 0


def test_modules_calls_and_methods():
    joint = ma.JointAttention(64, added_kv_proj_dim=64, heads=4, dim_head=16, rngs=nnx.Rngs(0))
    cross = ma.CrossAttention(64, cross_attention_dim=64, heads=4, dim_head=16, rngs=nnx.Rngs(0))
    x, text = states(1), jnp.ones((1, 20, 64))
    of_joint, of_cross = quick(joint, x, text), quick(cross, x, text)
    named = [(layer.name, layer.role) for of in (of_joint, of_cross) for layer in of.layers]
    assert named == [("JointAttention", "self"), ("CrossAttention", "cross")]
    same(quick(joint.without_out_bias, x, text), of_joint)
    of_call, loss = quick(ma.attention, X, X, X), lambda q: ma.attention(q, q, q).sum()
    same(quick(jax.grad(loss), X), of_call)


class Attends(nnx.Module):
    """A layer that calls the function, without a module of maxattn."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q = nnx.List([nnx.Linear(8, 8, rngs=rngs)])

    def __call__(self, x):
        assert not callable(self.q)
        q = self.q[0](x).reshape(1, 6, 2, 4)
        return ma.attention(q, q, q).reshape(x.shape)


@pytest.mark.parametrize("kind", ["swapped", "own"])
def test_calls_have_the_path_of_their_module(kind):
    make = Attends if kind == "own" else partial(nnx.MultiHeadAttention, 2, 8, decode=False)
    model = nnx.Sequential(*(make(rngs=nnx.Rngs(i)) for i in range(2)))
    if kind == "swapped":
        ma.swap(model, ma.AttentionConfig())
    found = ma.audit(model, jnp.ones((1, 6, 8)), kernels=())
    assert [layer.name for layer in found.layers] == ["layers.0", "layers.1"]
    assert type(model.layers[0]) in (Attends, nnx.MultiHeadAttention)


def test_all_examples_of_vmap_are_measured():
    q, k = jnp.stack([X, 2 * X]), jnp.stack([X, X, X.at[..., 1].set(9)])
    inner = jax.vmap(ma.attention, (None, 0, None))
    found = quick(jax.vmap(inner, (0, None, None)), q, k, 1e4 * X).layers[0]
    spread = (jnp.broadcast_to(x, (2, 3, *X.shape)) for x in (q[:, None], k, 1e4 * X))
    of_rows = quick(ma.attention, *(x.reshape(6, *X.shape[1:]) for x in spread)).layers[0].measures
    for name in ("q_norm", "k_norm", "bound", "limit", "outside", "k_offset", "k_outlier"):
        np.testing.assert_allclose(found.measures[name], of_rows[name], 1e-6)
    first = quick(ma.attention, q[0], k[0], 1e4 * X).layers[0].measures
    for name in ("score", "entropy", "int8"):
        np.testing.assert_allclose(found.measures[name], first[name], 1e-6)


def test_some_layers_of_a_scan():
    some = quick(Stack(), states(), angles(), sample=ma.AuditSample(calls=2))
    names = [layer.name for layer in some.layers]
    of = tuple(layer for layer in of_stack().layers if layer.name in names)
    assert len(of) == 2 and some.sample == "64 queries of a batch row, all heads, 2 calls, seed 0"
    same(some, replace(of_stack(), layers=of))


def test_grids_are_read_from_tables():
    assert grid_of_table(ma.rope_3d(128, 5, 6, 7)) == (5, 6, 7)
    assert grid_of_table(ma.rope_3d(16, 2, 8, 12, style="half")) == (2, 8, 12)
    assert grid_of_table(ma.rope_2d(64, 9, 5)) == (9, 5)
    assert grid_of_table(ma.rope_3d(64, np.array([3, 4, 5]), 4, 6)) == (3, 4, 6)
    for other in (ma.rope_1d(64, 24), ma.rope_3d(64, 2, 3, 4).split(7)[1]):
        assert grid_of_table(other) is None
    assert of_stack().grid == "2 x 8 x 12, windows time ±1, height ±1, width ±1"


# ---- nothing is left behind ----------------------------------------------------------------------


def test_results_and_traces_of_the_model_stay():
    graph, state = nnx.split(faulty())
    traces = []

    @jax.jit
    def step(state, x):
        traces.append(1)
        return nnx.merge(graph, state)(x, angles())

    before, written = step(state, states()), str(jax.make_jaxpr(step)(state, states()))
    assert len(quick(step, state, states()).layers) == models.LAYERS
    count = len(traces)
    assert str(jax.make_jaxpr(step)(state, states())) == written
    assert (step(state, states()) == before).all() and len(traces) == count
    assert "attention_call" not in written


@pytest.mark.parametrize("chosen", [(1, 1, 1, 1), (0, 1, 1, 0)])
def test_the_measured_program_computes_the_model_s_result(chosen):
    program = trace(Stack(), states(), angles())
    run = jax.jit(program.measured(lambda _, x, every: x[0].max(), [np.array(chosen, bool)]))
    (out,), (largest,) = run(*program.inputs)
    assert (out == nnx.jit(lambda model, x: model(x, angles()))(Stack(), states())).all()
    assert [x > 0 for x in largest] == list(chosen)


# ---- kernels, values, pictures -------------------------------------------------------------------


def test_kernels_are_compared():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 2, 64)).astype(jnp.bfloat16)
    names = ["dot_product", "memory_efficient", "flash", "tpu_few_keys", "cudnn"]
    found = ma.audit(ma.attention, q, k, v, ma.masks.Causal(), kernels=names, seconds=0.01)
    rows = {row.kernel: row for row in found.kernels}
    assert rows["dot_product"].is_planned and rows["dot_product"].ms > 0
    assert all(1e-4 < rows[name].error < 1e-2 for name in names[:3])
    assert rows["flash"].where.startswith("call 1, head ")
    assert rows["tpu_few_keys"].note.startswith("it takes masks that depend on keys alone")
    assert rows["cudnn"].note == "it needs an NVIDIA GPU, and this is cpu"
    unnamed = [row.kernel for row in ma.audit(ma.attention, q, k, v, seconds=0).kernels]
    assert unnamed[:2] == names[:2] and "flash" not in unnamed  # a CPU interprets it


def test_a_wrong_kernel_is_named():
    table.add(table.KernelRow("rough", "tests.auditing.models:Rough"))
    try:
        found = ma.audit(Stack(), states(), angles(), kernels=["rough", "dot_product"], seconds=0)
        half = X.astype(jnp.float16)
        fails = ma.audit(ma.attention, half, half, half, kernels=["rough"], seconds=0)
    finally:
        table.remove("rough")
    errors = [each for each in found.findings if each.kind == "kernel error"]
    assert [len(each.heads) for each in errors] == [models.HEADS] * models.LAYERS
    assert errors[0].why.startswith("rough has an error of 0.25 against float32, more than 0.001")
    assert found.kernels[0].error == pytest.approx(0.25, abs=1e-4)
    assert fails.kernels[0].note == "NotImplementedError: no float16 here" and fails.layers


def test_as_json_and_as_a_picture(tmp_path, monkeypatch):
    found = of_bad_value(np.inf)
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["layers"][0]["measures"]["score"] == list(found.layers[0].measures["score"])
    assert values["findings"][0]["kind"] == "non-finite"
    assert found.picture(tmp_path / "new" / "audit.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"maxattn\[plot\]"):
        found.picture(tmp_path / "audit.png")


# ---- bad input -----------------------------------------------------------------------------------


def in_a_while_loop(x):
    return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: ma.attention(x, x, x) - 1, x)


WRONG = {
    "no_call": lambda: ma.audit(jnp.sin, X),
    "while_loop": lambda: ma.audit(in_a_while_loop, X),
    "large_grid": lambda: quick(ma.attention, X, X, X, grid=(3, 4, 6)),
    "wrong_grid": lambda: quick(ma.attention, X, X, X, grid=(48,)),
    "no_queries": lambda: ma.AuditSample(queries=0),
    "text_as_heads": lambda: ma.AuditSample(heads="all"),  # type: ignore[arg-type]
    "under_jit": lambda: jax.jit(lambda: quick(ma.attention, X, X, X).grid)(),
    "under_vmap": lambda: jax.vmap(lambda x: quick(ma.attention, X, X, x).grid)(X[None]),
    "no_seconds": lambda: ma.audit(ma.attention, X, X, X, seconds=np.nan),
    "kernel_as_text": lambda: ma.audit(ma.attention, X, X, X, kernels="flash"),
    "unknown_kernel": lambda: ma.audit(ma.attention, X, X, X, kernels=["flahs"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_said_of_bad_input(name):
    check_refused(f"audit/{name}", MaxattnError, WRONG[name])
