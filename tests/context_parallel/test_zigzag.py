"""Zig-zag order: balanced work, correct numbers, and the reason in the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import maxattn as ma
from maxattn import devices as maxattn_devices
from maxattn import masks as M
from maxattn.context_parallel.ring.zigzag import ChunkLayout
from maxattn.decide import decide
from tests.cases import BIASES, MASKS, judge, run_case
from tests.pairwise import name_of, pairwise
from tests.waiting import but

TPU = ma.Target.named("TPU v5p")


@pytest.fixture
def free_permutes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the cost of permutes to zero, so that short uneven masks get zig-zag order too."""
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
    sizes = {"ici_data_parallelism": 1, "ici_context_parallelism": context}
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
    # Of the four pieces of a hop after the first, two are empty.
    pieces = ~ChunkLayout(n, 2).empty(causal, length, length)
    assert (pieces[:, 0].sum(axis=(1, 2)) == 3).all()
    assert (pieces[:, 1:].sum(axis=(2, 3)) == 2).all()


# ---- the choice ----------------------------------------------------------------------------------


def decided(
    mask: M.Mask | None, length: int, context: int = 8, target: ma.Target = TPU, **more: Any
) -> ma.Plan:
    x = jax.ShapeDtypeStruct((8, length, 8, 128), "bfloat16")
    asked = ma.AttentionConfig(attention="ring", **more)
    return ma.plan(ma.Call.of(x, x, mask=mask), asked, {"context": context}, target)


def test_it_is_chosen_for_long_causal_work_and_the_plan_says_why() -> None:
    plan = decided(M.Causal(), 32768)
    assert plan.strategy.chunks_per_rank == 2
    assert "ring over 8, zig-zag" in plan.explain()
    assert "2 x 2048 queries" in plan.explain()
    (note,) = [note for note in plan.notes if "zig-zag" in note]
    work = "the slowest device has 1.00 times the mean work, and 1.87 times in contiguous order;"
    assert note.startswith(f"zig-zag: with it {work}")
    assert "not measured by us" in note


@pytest.mark.parametrize(
    ("mask", "length", "why"),
    [
        (M.Causal(), 64, ["of it for permutes"]),
        (M.BlockSlidingWindow(1560, 7), 32760, ["with it the slowest device has 1.78 times"]),
        (None, 32768, []),
        (M.KeyPadding(np.full(8, 5)), 32768, []),
    ],
)
def test_it_is_not_chosen_if_it_gains_nothing(mask: Any, length: int, why: list[str]) -> None:
    plan = decided(mask, length)
    assert plan.strategy.chunks_per_rank == 1
    notes = [note for note in plan.notes if "zig-zag" in note]
    assert len(notes) == len(why)  # even work has no note
    assert all(note.startswith("no zig-zag: ") for note in notes)
    assert all(text in note for text, note in zip(why, notes, strict=True))


def test_lengths_are_padded_to_two_chunks_of_every_rank() -> None:
    plan = decided(M.Causal(), 32760)
    assert (plan.q_len, plan.kv_len) == (32768, 32768)
    assert decided(None, 32760).q_len == 32760


# ---- the numbers ---------------------------------------------------------------------------------

UNEVEN = ("window", "window | sink", "not segments", "rows empty")
AXES = {
    "strategy": ["ring", "2 x ring 2"],
    "context": [4],
    "kernel": ["dense", "flash"],
    "mask": [m for m in MASKS if "causal" in m or m in UNEVEN],
    "heads": ["8 of 8", "8 of 2"],
    "length": ["odd", "64", "cross", "short"],
    "bias": list(BIASES),
    "dtype": ["float32"],
}
KERNELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "blockwise": {
        "use_memory_efficient_attention": True, "query_chunk_size": 8, "key_chunk_size": 24,
    },
    "flash": {"attention_kernel": "flash"},
}  # fmt: skip


def legal(case: dict) -> bool:
    """Splash takes no bias, and no arrays inside ~."""
    return case["kernel"] != "flash" or (case["bias"] == "none" and case["mask"] != "not segments")


SMALL = (
    ("ring", 4, "dense", "causal", "8 of 2", "cross", "keys", "float32"),
    ("2 x ring 2", 4, "dense", "causal & lengths", "8 of 2", "odd", "full", "float32"),
)


CASES = [dict(zip(AXES, row, strict=True)) for row in SMALL]
ALL = pairwise(AXES | {"context": [4, 8], "kernel": list(KERNELS)}, legal)


@pytest.mark.parametrize("case", but([*CASES, *ALL], CASES), ids=name_of)
def test_against_float64(case: dict, free_permutes: None) -> None:
    kernel = KERNELS[case["kernel"]]
    shards = {} if case["strategy"] == "ring" else {"ulysses_shards": 2}
    asked = config(case["context"], "ulysses_ring" if shards else "ring", **kernel, **shards)
    case = case | {"head_dim": 16, "batch": 2}
    judge(case, run_case(case, asked, asked.make_mesh(jax.devices()[: case["context"]])))
