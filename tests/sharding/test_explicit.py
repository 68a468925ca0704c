"""Attention on meshes with Explicit axes, as `jax.make_mesh` makes them, against float64.

Their programs have the transfers of the same call on Auto axes.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import MeshError
from maxattn.sharding import mesh_shape, partition_spec
from maxattn.tools.compile.hlo import transfers
from tests import waiting
from tests.cases import BIASES, RESULTS, allowed, arrays, judge
from tests.pairwise import name_of, pairwise, plainly
from tests.reference import attention64, error

P = PartitionSpec
KINDS = {"explicit": "EEE", "mixed": "EAE", "context alone": "AEA", "auto": "AAA"}
TYPES = {"E": AxisType.Explicit, "A": AxisType.Auto}
SIZES = {"2 2 2": (2, 2, 2), "1 4 2": (1, 4, 2), "8 devices of context": (1, 8, 1)}
AXES = {
    "axes": list(KINDS),
    "sizes": list(SIZES),
    "mesh": ["passed", "ambient", "none"],
    "jit": [True, False],
    "strategy": ["ring", "ulysses", "ulysses_ring", "all_gather"],
    "chunks": [True, False],
    "mask": ["full", "causal & lengths", "segments", "dense heads"],
    "bias": list(BIASES),
    "length": ["64", "odd", "cross"],
    "heads": ["8 of 8", "8 of 2"],
}


def mesh_of(kinds: str = "EEE", sizes: tuple[int, ...] = (2, 2, 2)) -> Mesh:
    """Build a mesh with Explicit axes."""
    types = tuple(TYPES[kind] for kind in kinds)
    return jax.make_mesh(sizes, ("fsdp", "context", "tensor"), axis_types=types)


def put(x: Any, mesh: Mesh, letters: str) -> jax.Array:
    """Shard an array as attention does, unsplit along axes that do not divide."""
    spec = partition_spec(letters, mesh_shape(mesh))
    over = [axes if axes and x.shape[i] % _ways(axes, mesh) == 0 else None
            for i, axes in enumerate(spec)]  # fmt: skip
    return jax.device_put(x, NamedSharding(mesh, P(*over)))


def _ways(axes: Any, mesh: Mesh) -> int:
    return int(np.prod([mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes)]))


# What the code depends on; the rest meets every strategy, and each other only in test_all_pairs.
CORE = ("strategy", "axes", "mesh")


def few() -> list[dict]:
    """Leave out chunks, and calls that run op by op, unless a pair of CORE needs them.

    Biases whose axes are sharded alike count as one.
    """
    biases = {"bias": [bias for bias in BIASES if bias not in ("shared", "far")]}
    cases = pairwise(AXES | biases, lambda case: True, core=CORE)
    for axis, plain in (("chunks", False), ("jit", True)):
        cases = plainly(cases, axis, plain, lambda case: True, CORE)
    return cases


FEW = few()
# Chunks in rings, which compile for seconds, wait: what lies how is the same with them. Each
# strategy meets Explicit and Auto axes in what its program moves, below.
QUICK = [case for case in FEW if not (case["chunks"] and "ring" in case["strategy"])]


@pytest.mark.parametrize(
    "case", waiting.but(FEW, waiting.enough(QUICK, ("mesh", "axes"))), ids=name_of
)
def test_pairs(case: dict) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(AXES, lambda case: True), ids=name_of)
def test_all_pairs(case: dict) -> None:
    check(case)


def check(case: dict) -> None:
    mesh = mesh_of(KINDS[case["axes"]], SIZES[case["sizes"]])
    fixed = {"dtype": "float32", "head_dim": 8, "batch": 2}
    with jax.set_mesh(mesh) if case["mesh"] == "ambient" else jax.set_mesh(None):
        judge(case | fixed, errors_of(case | fixed, mesh))


def errors_of(case: dict, mesh: Mesh) -> dict[str, float]:
    """Run forward and backward; return the errors against float64."""
    x = arrays(case)
    config = ma.AttentionConfig(
        attention="dot_product",
        use_memory_efficient_attention=case["chunks"],
        context_parallel=case["strategy"],
    )
    given = {"mesh": mesh} if case["mesh"] == "passed" else {}
    call = partial(ma.attention, mask=x["mask"], config=config, return_lse=True, **given)
    ok = allowed(x["mask"], x["q"].shape[1], x["k"].shape[1])
    seen = np.ones((1, 1, 1), bool) if ok is None else ok.any(-1)
    dlse = np.where(seen, x["dlse"], np.float32(0))

    def both(q, k, v, bias, dout, dlse):
        (out, lse), vjp = jax.vjp(lambda q, k, v, bias: call(q, k, v, bias=bias), q, k, v, bias)
        return out, lse, *vjp((dout, dlse))

    letters = {"q": "BTNH", "k": "BSKH", "v": "BSKH", "dout": "BTNH", "dlse": "BNT"}
    on = {name: put(v, mesh, letters[name]) for name, v in (x | {"dlse": dlse}).items()
          if name in letters}  # fmt: skip
    run = jax.jit(both) if case["jit"] else both
    got = run(on["q"], on["k"], on["v"], x["bias"], on["dout"], on["dlse"])
    assert jax.typeof(got[0]) == jax.typeof(on["q"])  # the output lies as q does
    want = attention64(x["q"], x["k"], x["v"], ok, x["bias"], dout=x["dout"], dlse=dlse)
    return {n: error(g, w) for n, g, w in zip(RESULTS, got, want, strict=True) if w is not None}


# ---- the compiled program ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", AXES["strategy"])
def test_the_program_moves_what_it_moves_over_auto_axes(strategy: str) -> None:
    found = {kinds: program_of(strategy, mesh_of(kinds)) for kinds in ("EEE", "AAA")}
    assert found["EEE"] == found["AAA"] and found["EEE"]


def program_of(strategy: str, mesh: Mesh) -> Counter[tuple[str, int]]:
    """Count the transfers of forward and backward, by kind and bytes."""
    config = ma.AttentionConfig(attention="dot_product", context_parallel=strategy)
    x = put(np.ones((2, 32, 8, 16), "f"), mesh, "BTNH")

    def both(q, k, v, dout):
        out, vjp = jax.vjp(lambda *x: ma.attention(*x, config=config, mesh=mesh), q, k, v)
        return out, *vjp(dout)

    text = jax.jit(both, out_shardings=x.sharding).lower(x, x, x, x).compile().as_text()
    return Counter((t.kind, t.bytes) for t in transfers(text))


# ---- transformations -----------------------------------------------------------------------------

CONFIG = ma.AttentionConfig(attention="dot_product", context_parallel="ring")
X = np.random.default_rng(0).normal(size=(2, 16, 4, 8)).astype("f")
MASK = M.KeyPadding(np.array([10, 16], np.int32)) & M.Causal()
SPEC = P("fsdp", "context", "tensor", None)


def attend(q: Any) -> Any:
    return ma.attention(q, q, q, mask=MASK, config=CONFIG)


def same(got: Any, want: Any) -> None:
    assert error(got, np.asarray(want)) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("over", waiting.but([None, "fsdp"], ["fsdp"]), ids=["whole", "over fsdp"])
def test_vmap_of_an_axis_that_lies_over_the_mesh(over: str | None) -> None:
    """The mesh axis over which a mapped axis is sharded belongs to vmap, not to attention."""
    mesh, many = mesh_of(), np.stack([X, 2 * X])
    spec = P(over, None if over else "fsdp", "context", "tensor")
    with jax.set_mesh(mesh):
        x = jax.device_put(many, NamedSharding(mesh, spec))
        out = jax.jit(jax.vmap(attend))(x)
        slope = jax.jit(jax.vmap(jax.grad(lambda q: (attend(q) ** 2).sum())))(x)
    assert jax.typeof(out).sharding.spec == P(*spec, None) == jax.typeof(slope).sharding.spec
    for i, each in enumerate(many):
        same(np.asarray(out)[i], attend(each))
        same(np.asarray(slope)[i], jax.grad(lambda q: (attend(q) ** 2).sum())(each))


def test_scan_and_remat() -> None:
    mesh = mesh_of()

    def loss(x: Any) -> Any:
        step = jax.checkpoint(lambda q, _: (attend(q), None))
        return (jax.lax.scan(step, x, None, length=3)[0] ** 2).sum()

    want = jax.grad(loss)(X)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, SPEC))
        same(jax.jit(jax.grad(loss))(x), want)


def test_inside_a_shard_map_over_one_of_the_axes() -> None:
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, SPEC))
        local = jax.shard_map(
            lambda q: ma.attention(q, q, q, config=CONFIG),
            in_specs=P("fsdp"), out_specs=P("fsdp"), axis_names={"fsdp"},
        )  # fmt: skip
        same(jax.jit(local)(x), ma.attention(X, X, X))


def test_inside_auto_axes_attention_leaves_the_layout_to_them() -> None:
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, SPEC))
        out = jax.jit(jax.sharding.auto_axes(attend, out_sharding=P("fsdp")))(x)
    assert jax.typeof(out).sharding.spec == P("fsdp", None, None, None)
    same(out, attend(X))


def test_operands_without_a_layout_on_a_mesh_that_is_passed() -> None:
    same(ma.attention(X, X, X, mask=MASK, config=CONFIG, mesh=mesh_of()), attend(X))


def test_a_batch_of_other_operands_lies_as_it_likes() -> None:
    """A text may be replicated on every device, beside states that are sharded."""
    mesh, text = mesh_of(), X[:, :5]
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, SPEC))
        kv = jax.device_put(text, NamedSharding(mesh, P()))
        out = jax.jit(lambda q, kv: ma.attention(q, kv, kv, role="cross"))(x, kv)
    assert jax.typeof(out) == jax.typeof(x)
    same(out, ma.attention(X, text, text))


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("q", P(None, None, None, "tensor"), "q: H over tensor"),
        ("q", P("context"), "q: B over context"),
        ("k", P(None, "fsdp"), "k: S over fsdp"),
        ("v", P(None, None, ("context", "tensor")), "v: K over context"),
    ],
)
def test_a_layout_that_attention_would_have_to_undo_is_refused(
    name: str, spec: PartitionSpec, words: str
) -> None:
    mesh, x = mesh_of(), jnp.ones((8, 16, 8, 8))
    with jax.set_mesh(mesh), pytest.raises(MeshError) as refused:
        given = dict.fromkeys("qkv", jax.device_put(x, NamedSharding(mesh, P())))
        given[name] = jax.device_put(x, NamedSharding(mesh, spec))
        ma.attention(**given)
    text = str(refused.value)
    assert text.startswith(words) and f"jax.sharding.reshard({name}, " in text


# ---- no mesh -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "types", waiting.but([AxisType.Auto, AxisType.Explicit], [AxisType.Explicit])
)
@pytest.mark.parametrize("names", [("data", "tensor"), ("data", "model")])
def test_a_call_opts_out_of_the_surrounding_mesh(names: tuple[str, str], types: AxisType) -> None:
    """A batch that does not divide, and heads over an axis of any name, keep their sharding."""
    mesh = jax.make_mesh((2, 4), names, axis_types=(types,) * 2)
    alone = ma.attention(X[:1], X[:1], X[:1])
    with jax.set_mesh(mesh):
        x = jax.device_put(X[:1], NamedSharding(mesh, P(None, None, names[1])))
        program = jax.jit(lambda q: ma.attention(q, q, q, mesh=False))
        assert not transfers(program.lower(x).compile().as_text())
        same(program(x), alone)
        module = ma.FlaxAttention(32, heads=4, dim_head=8, mesh=False, rngs=nnx.Rngs(0))
        assert nnx.jit(lambda m, x: m(x))(module, jnp.ones((1, 5, 32))).shape == (1, 5, 32)
    assert ma.plan(ma.Call.of(X, X), mesh=False).mesh == ()
