"""A ring's schedule on GPUs, run on eight CPU devices: its numbers and its transfers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn._attention import run
from maxattn.call import bind_mask
from maxattn.context_parallel.ring import gpu_full_mask
from maxattn.context_parallel.ring.gpu import MODE, GpuSchedule
from maxattn.context_parallel.ring.ring import Ring
from maxattn.kernels import kv_block
from maxattn.kernels.base import Grads, Inputs, Rows
from maxattn.kernels.composed.pair import Pair
from maxattn.kernels.dot_product import DotProduct
from maxattn.kernels.fa4.kernel import HopperFa4, LibraryFa4
from maxattn.masks import Full
from tests.cases import HEADS, TOLERANCE, allowed, arrays, both, compare
from tests.gpu.dense import DenseLibrary
from tests.jaxprs import count_primitive, equations
from tests.pairwise import name_of, pairwise
from tests.reference import attention64, error
from tests.waiting import few

AXES = {
    "mask": ["full", "causal", "block window", "segments", "causal & lengths", "nothing"],
    "length": ["64", "odd"],
    "heads": ["mha", "gqa"],
    "size": [4],
    "strategy": ["ring", "ulysses_ring"],
    "bias": ["none", "full", "far"],
    "dtype": ["float32", "bfloat16"],
    "head_dim": [8],
    "batch": [2],
}  # fmt: skip


def legal(case: dict) -> bool:
    return case["strategy"] == "ring" or case["heads"] == "mha"


def planned(case: dict, x: dict) -> tuple[ma.Plan, jax.sharding.Mesh]:
    """Plan for a CPU, but with the schedule for GPUs."""
    sizes = {"ici_context_parallelism": case["size"], "ici_data_parallelism": 1}
    if case["strategy"] == "ulysses_ring":
        sizes["ulysses_shards"] = 2
    config = ma.AttentionConfig(attention="dot_product", context_parallel=case["strategy"], **sizes)
    mesh = config.make_mesh(jax.devices()[: case["size"]])
    mask = bind_mask(x["mask"], x["q"], x["k"])
    call = ma.Call.of(x["q"], x["k"], mask, x["bias"], return_lse=True)
    plan = ma.plan(call, config, mesh)
    ring: Any = plan.strategy
    return replace(plan, strategy=replace(ring, schedule=GpuSchedule())), mesh


# Masks and biases meet each other inside of the kernels, whose tests pair them.
@pytest.mark.parametrize(
    "case",
    few(pairwise(AXES, legal, core=("strategy", "dtype")), ("strategy", "dtype")),
    ids=name_of,
)
def test_against_float64(case: dict) -> None:
    """Compare with float64; count the permutes of the program."""
    x = arrays(case)
    t, s = x["q"].shape[1], x["k"].shape[1]
    ok = allowed(x["mask"], t, s)
    x["dlse"] = np.where(True if ok is None else ok.any(-1), x["dlse"], np.float32(0))
    plan, mesh = planned(case, x)
    mask = Full() if x["mask"] is None else x["mask"]
    mask = mask.bind(t, s, case["batch"], HEADS[case["heads"]][0])
    operands = x["q"], x["k"], x["v"], x["bias"]
    traced = jax.jit(partial(both, partial(run, plan, mask=mask, mesh=mesh), x)).trace(*operands)
    named = sum(c.hops * c.arrays for c in plan.collectives if c.kind == "ppermute")
    assert count_primitive(traced.jaxpr.jaxpr, "ppermute") == named
    want = attention64(*operands[:3], ok, x["bias"], dout=x["dout"], dlse=x["dlse"])
    compare(traced.lower().compile()(*operands), want, TOLERANCE[case["dtype"]])


def test_gradients_of_keys_go_home_in_the_dtype_of_k() -> None:
    case = {name: values[0] for name, values in AXES.items()} | {"size": 4, "dtype": "bfloat16"}
    plan, _ = planned(case, arrays(case))
    found = {(c.what, c.when): c for c in plan.collectives}
    assert {key: (c.hops, c.arrays) for key, c in found.items()} == {
        ("K,V", "forward"): (3, 1), ("K,V", "backward"): (3, 1), ("dK,dV", "backward"): (3, 1),
    }  # fmt: skip
    assert found["dK,dV", "backward"].bytes == found["K,V", "backward"].bytes


@pytest.mark.parametrize("ring_size", range(1, 9))
@pytest.mark.parametrize("length", [1, 2, 300, 8190])
def test_every_transfer_has_a_kernel_of_its_own_beside_it(ring_size: int, length: int) -> None:
    made = list(gpu_full_mask.steps(ring_size, kv_block.middle_key(length)))
    for hop in range(ring_size):
        ends = [step.key_range.bounds(length) for step in made if step.hop == hop]
        assert [a for a, _ in ends] == [0, *(b for _, b in ends[:-1])] and ends[-1][1] == length
        assert all(a < b for a, b in ends)
    assert sum(step.fetches for step in made) == ring_size - 1
    if length > 1:  # none is left for after the last kernel, and XLA would wait for one of two
        assert sum(step.returns for step in made) == ring_size - 1
        assert not any(step.fetches and step.returns for step in made)
    # The keys of a hop are there, and gradients are whole, before they are used.
    fetched = [step.hop + 1 for step in made if step.fetches]
    assert fetched == list(range(1, ring_size))
    for i, step in enumerate(made):
        assert step.hop == 0 or any(s.fetches and s.hop == step.hop - 1 for s in made[:i])


@pytest.mark.parametrize("ring_size", [2, 8])
def test_what_travels_is_used_only_after_the_kernel_beside_it(ring_size: int) -> None:
    """A permute's result goes only into a barrier together with a kernel's results."""
    case = {name: values[0] for name, values in AXES.items()} | {"size": ring_size}
    x = arrays(case)
    plan, mesh = planned(case, x)

    def both(q, k, v):
        out, vjp = jax.vjp(lambda *x: run(plan, *x, None, Full().bind(64, 64), mesh)[0], q, k, v)
        return vjp(out)

    eqns = list(equations(jax.make_jaxpr(both)(x["q"], x["k"], x["v"]).jaxpr))
    permutes = [eqn for eqn in eqns if eqn.primitive.name == "ppermute"]
    assert len(permutes) == 3 * (ring_size - 1)
    for permute in permutes:
        (user,) = [eqn for eqn in eqns if permute.outvars[0] in eqn.invars]
        assert user.primitive.name == "optimization_barrier" and len(user.invars) > 1


def test_explain_names_the_copy_engines_option_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, flag = jax.ShapeDtypeStruct((1, 4096, 8, 64), "bfloat16"), f"--{MODE}=peer"
    config = ma.AttentionConfig(attention="dot_product", context_parallel="ring")
    target = ma.Target.named("NVIDIA H200")

    def names_it(device: ma.Target) -> bool:
        return flag in ma.plan(ma.Call.of(x, x), config, {"context": 4}, device).explain()

    assert names_it(target) and not names_it(ma.Target.named("TPU v5p"))
    assert not names_it(replace(target, env=(("XLA_FLAGS", flag),)))
    assert not Ring((("context", 1),), GpuSchedule()).notes()
    # a backend that starts only now would have one device, for all tests after this one
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", flag)
    assert dict(ma.Target.here().env)["XLA_FLAGS"] == flag


@pytest.mark.slow
def test_gradients_travel_in_the_dtype_of_k_and_are_summed_in_float32() -> None:
    class InFloat32(DenseLibrary):
        def backward(self, *operands):
            grads = super().backward(*operands)
            return Grads(*(x if x is None else x.astype(jnp.float32) for x in grads))

    x = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    rows = Rows(x, jnp.zeros((1, 2, 4)), x, jnp.zeros((1, 2, 4)))
    accumulator = InFloat32(1.0).accumulator(Inputs(x, x, x), rows)
    assert accumulator.add(kv_block.pack(x, x)).dtype == jnp.bfloat16
    parts = [jnp.full(2, value, jnp.bfloat16) for value in (256, 1, 1)]  # 257 is no bfloat16
    assert kv_block.total(parts, parts[0]).tolist() == [258, 258]


CUTS = {"whole": ((0, None),), "parts": ((0, 2), (2, None)), "three": ((0, 1), (2, None), (1, 2))}


@pytest.mark.parametrize(("blocks", "cuts"), [(1, "three"), (3, "parts"), (11, "whole")])
def test_sums_over_blocks_are_the_backward_over_all_keys(blocks: int, cuts: str) -> None:
    rng = np.random.default_rng(3)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(2, 33, 2, 8)), jnp.float32) for _ in range(4))
    want = attention64(q, k, v, dout=dout)
    out, lse = (jnp.asarray(x, jnp.float32) for x in (want.out, want.lse))
    rows = Rows(out, lse, dout, jnp.zeros((2, 2, 33)))

    @jax.jit
    def gradients(inputs: Inputs, rows: Rows) -> tuple[jax.Array, ...]:
        made, parts = DenseLibrary(8**-0.5).accumulator(inputs, rows), []
        for keys in jnp.split(kv_block.pack(inputs.k, inputs.v), blocks, 2):
            grads = None
            for cut in CUTS[cuts]:
                grads = made.add(keys, kv_block.KeyRange(*cut), grads)
            parts.append(grads)
        return made.dq(), *jnp.concatenate(parts, 2)

    got = gradients(Inputs(q, k, v), rows)
    assert max(error(g, w) for g, w in zip(got, want[2:5], strict=True)) < 2e-5


# ---- which kernels keep dQ in one sum over the blocks of a ring ----------------------------------


def shapes(length: int = 8190, heads: int = 40, kv_heads: int = 40) -> Inputs:
    q: Any = jax.ShapeDtypeStruct((1, length, heads, 128), "bfloat16")
    k: Any = jax.ShapeDtypeStruct((1, length, kv_heads, 128), "bfloat16")
    return Inputs(q, k, k)


def test_a_pair_answers_with_its_second() -> None:
    assert "block by block" in Pair(DotProduct(0.1), HopperFa4(0.1)).accumulator_line(shapes())
    assert Pair(HopperFa4(0.1), DotProduct(0.1)).accumulator_line(shapes()) == ""


@pytest.mark.parametrize("why", ["short", "shared keys", "gradient of the LSE", "other GPUs"])
def test_flash_attention_4_sums_parts_where_its_launches_do_not_fit(why: str) -> None:
    kind = LibraryFa4 if why == "other GPUs" else HopperFa4
    kernel = kind(0.1, why == "gradient of the LSE")
    x = shapes(8 if why == "short" else 256, 2, 1 if why == "shared keys" else 2)
    out, lse = jnp.zeros(x.q.shape, "bfloat16"), jnp.zeros((1, 2, x.q.shape[1]))
    assert isinstance(kernel.accumulator(x, Rows(out, lse, out, lse)), kv_block.SumOfParts)
    assert kernel.accumulator_line(x) == ""


def test_no_strategy_names_a_kernel() -> None:
    folder = Path(ma.__file__).parent
    shared = ("base", "composed/pair", "composed/padded_heads", "kv_block")
    files = [*folder.glob("context_parallel/**/*.py")]
    files += [folder / "kernels" / f"{name}.py" for name in shared]
    assert len(files) > 15
    assert not [file.name for file in files if "fa4" in file.read_text().lower()]
