"""Zig-zag: the work is even, the numbers are those of one device, and the plan says why it was or
was not taken.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import devices as maxattn_devices
from maxattn import masks as M
from maxattn.context_parallel.ring.zigzag import ChunkLayout
from maxattn.decide import decide
from tests import waiting
from tests.cases import BIASES, MASKS, judge, run_case
from tests.jaxprs import of_primitive
from tests.pairwise import pairwise

TPU = ma.Target.named("TPU v5p")


@pytest.fixture
def free_permutes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let permutes cost nothing on a CPU, so that every uneven mask takes zig-zag, at test
    lengths too.
    """
    cpu = maxattn_devices.DEVICES["cpu"]
    assert cpu.machine is not None
    free = replace(cpu, machine=cpu.machine._replace(exchange=1e30))
    monkeypatch.setitem(maxattn_devices.DEVICES, "cpu", free)
    monkeypatch.setattr("maxattn.context_parallel.timeline.START", 0.0)
    for cached in (decide, maxattn_devices.device_of):
        cached.cache_clear()
    yield
    for cached in (decide, maxattn_devices.device_of):
        cached.cache_clear()


def config(context: int, strategy: str = "ring", **more: Any) -> ma.AttentionConfig:
    sizes = {"ici_data_parallelism": 8 // context, "ici_context_parallelism": context}
    return ma.AttentionConfig(
        attention=strategy, **{"attention_kernel": "dot_product"} | more, **sizes
    )


# ---- the work ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 8])
def test_causal_work_of_every_device_is_equal_in_every_hop(n: int) -> None:
    length = 64 * n
    causal = M.Causal().bind(length, length)
    contiguous, zigzag = (ChunkLayout(n, chunks).work(causal, length, length) for chunks in (1, 2))
    # [device, hop]: no two devices differ in a hop, where in contiguous order the first has nothing
    # to do after hop 0.
    assert (zigzag == zigzag[0]).all()
    assert (contiguous[0, 1:] == 0).all()
    assert (contiguous[-1, 1:] == 64 * 64).all()
    assert zigzag.sum() == contiguous.sum() == causal.allowed_pairs(length, length)


@pytest.mark.parametrize("n", [4, 8])
def test_every_device_computes_two_of_four_pieces_after_its_own(n: int) -> None:
    pieces = ~ChunkLayout(n, 2).empty(M.Causal().bind(16 * n, 16 * n), 16 * n, 16 * n)
    assert (pieces[:, 0].sum(axis=(1, 2)) == 3).all()
    assert (pieces[:, 1:].sum(axis=(2, 3)) == 2).all()


# ---- the choice ----------------------------------------------------------------------------------


def decided(
    mask: M.Mask | None, length: int, context: int = 8, target: ma.Target = TPU, **more: Any
) -> ma.Plan:
    x = jax.ShapeDtypeStruct((8, length, 8, 128), "bfloat16")
    asked = ma.AttentionConfig(attention="ring", **more)
    return ma.plan(ma.Call.of(x, x, mask=mask), asked, {"context": context}, target)


def test_it_is_chosen_for_long_causal_work_and_said() -> None:
    plan = decided(M.Causal(), 32768)
    assert plan.strategy.chunks_per_rank == 2
    assert "ring over 8, zig-zag" in plan.explain()
    assert "2 x 2048 queries" in plan.explain()
    (note,) = [note for note in plan.notes if "zig-zag" in note]
    assert note.startswith(
        "zig-zag: the slowest devices' work is 1.00 of the mean, in contiguous order 1.87;"
    )
    assert "not measured by us" in note


@pytest.mark.parametrize(
    ("mask", "length", "why"),
    [
        (M.Causal(), 64, "its permutes cost"),
        (
            M.BlockSlidingWindow(1560, 7),
            32760,
            "no zig-zag: with it the slowest devices' work is 1.78 of the mean",
        ),
    ],
)
def test_it_is_not_chosen_where_it_costs_more_and_that_is_said(
    mask: M.Mask, length: int, why: str
) -> None:
    plan = decided(mask, length)
    assert plan.strategy.chunks_per_rank == 1
    (note,) = [note for note in plan.notes if "zig-zag" in note]
    assert note.startswith("no zig-zag")
    assert why in note


def test_even_work_is_not_worth_a_word() -> None:
    for mask in (None, M.KeyPadding(np.full(8, 5))):
        assert not [note for note in decided(mask, 32768).notes if "zig-zag" in note]


def test_lengths_are_padded_to_two_chunks_of_every_rank() -> None:
    plan = decided(M.Causal(), 32760)
    assert (plan.q_len, plan.kv_len) == (32768, 32768)
    assert decided(None, 32760).q_len == 32760


# ---- the numbers ---------------------------------------------------------------------------------

AXES = {
    "strategy": ["ring", "2 x ring 2"],
    "context": [4],
    "kernel": ["dense", "flash"],
    "mask": [
        m
        for m in MASKS
        if "causal" in m or m in ("window", "window | sink", "not segments", "rows empty")
    ],
    "heads": ["8 of 8", "8 of 2"],
    "length": ["odd", "64", "cross", "short"],
    "bias": list(BIASES),
    "dtype": ["float32"],
}
KERNELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "blockwise": {
        "use_memory_efficient_attention": True,
        "query_chunk_size": 8,
        "key_chunk_size": 24,
    },
    "flash": {"attention_kernel": "flash"},
}


def legal(case: dict) -> bool:
    """Splash takes no bias, and no arrays under ~."""
    return case["kernel"] != "flash" or (case["bias"] == "none" and case["mask"] != "not segments")


def name(case: dict) -> str:
    return "-".join(str(v).replace(" ", "_") for v in case.values())


def check(case: dict) -> None:
    kernel = KERNELS[case["kernel"]]
    shards = {} if case["strategy"] == "ring" else {"ulysses_shards": 2}
    asked = config(case["context"], "ulysses_ring" if shards else "ring", **kernel, **shards)
    case = case | {"head_dim": 16, "batch": 8}
    judge(
        case,
        run_case(
            case, asked, asked.make_mesh(), compiler_options={"xla_backend_optimization_level": 0}
        ),
    )


FEW = {
    "kernel": ["dense"], "mask": ["causal", "causal & lengths", "window | sink", "not segments"],
    "bias": ["none", "full", "keys", "far"], "length": ["odd", "cross"],
}  # fmt: skip


def few(case: dict) -> bool:
    """Every mask meets a bias of each row, and causal all; two intervals compile long, and a mask
    under ~ does.
    """
    if case["mask"] == "window | sink":
        once = {"bias": "none", "strategy": "ring", "heads": "8 of 2", "length": "odd"}
        return all(case[axis] == value for axis, value in once.items())
    if case["mask"] == "not segments" and case["strategy"] != "ring":
        return False
    return case["mask"] == "causal" or case["bias"] in ("none", "full")


@pytest.mark.parametrize(
    "case",
    waiting.few(pairwise(AXES | FEW, few, core=("mask", "strategy")), ("strategy", "heads")),
    ids=name,
)
def test_against_one_device_in_float64(case: dict, free_permutes: None) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", pairwise(AXES | {"context": [4, 8], "kernel": list(KERNELS)}, legal), ids=name
)
def test_against_one_device_in_float64_on_eight(case: dict, free_permutes: None) -> None:
    check(case)


def test_those_cases_take_zigzag(free_permutes: None) -> None:
    x = jax.ShapeDtypeStruct((8, 64, 8, 16), "float32")
    for strategy, shards in (("ring", -1), ("ulysses_ring", 2)):
        asked = config(8, strategy, ulysses_shards=shards)
        plan = ma.plan(ma.Call.of(x, x, mask=M.Causal()), asked, {"context": 8})
        assert plan.strategy.chunks_per_rank == 2


ZIGZAG_TERMS: dict[str, tuple[Any, tuple[int, ...] | None]] = {
    "causal": (lambda ids: M.Causal(), None),
    "segments": (lambda ids: M.Causal() & M.Segments(ids, ids), None),
    "bias": (lambda ids: M.Causal(), (1, 4, 64, 64)),
    "bias of keys": (lambda ids: M.Causal() & M.KeyPadding(np.array([50])), (1, 1, 1, 64)),
    "bias of rows": (lambda ids: M.Causal(), (1, 4, 64, 1)),
}


def terms_by_dtype() -> list[Any]:
    """Pair terms with dtypes: in bfloat16 what travels in float32 has a size of its own."""
    few = ("causal", "bias")
    plain = [
        pytest.param(terms, "float32", marks=[] if terms in few else pytest.mark.slow)
        for terms in ZIGZAG_TERMS
    ]
    return [*((terms, "bfloat16") for terms in ZIGZAG_TERMS), *plain]


@pytest.mark.parametrize(("terms", "dtype"), terms_by_dtype())
def test_the_plan_names_every_permute_and_its_bytes(
    terms: str, dtype: str, free_permutes: None
) -> None:
    asked = config(4).replace(ici_data_parallelism=1)
    mesh, rng = asked.make_mesh(jax.devices()[:4]), np.random.default_rng(0)
    q, k, v = (jnp.ones((1, 64, 4, 16), dtype) for _ in range(3))
    make, shape = ZIGZAG_TERMS[terms]
    mask = make(jnp.asarray(np.sort(rng.integers(0, 3, (1, 64)), 1), jnp.int32))
    bias = None if shape is None else jnp.ones(shape)

    def loss(q, k, v, bias):
        out = ma.attention(q, k, v, mask=mask, bias=bias, config=asked, mesh=mesh)
        return (out**2).sum()

    step = jax.grad(loss, (0, 1, 2) if bias is None else (0, 1, 2, 3))
    plan = ma.plan(ma.Call.of(q, k, mask=mask, bias=bias), asked, mesh)
    assert plan.strategy.chunks_per_rank == 2
    named = [c for c in plan.collectives if c.kind == "ppermute"]
    sent = of_primitive(jax.make_jaxpr(step)(q, k, v, bias).jaxpr, "ppermute")
    assert sum(c.hops * c.arrays for c in named) == len(sent)
    found = [x.aval for eqn in sent for x in eqn.outvars]
    assert sum(c.bytes for c in named) == sum(x.size * x.dtype.itemsize for x in found)
