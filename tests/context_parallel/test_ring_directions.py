"""Rings that send halves of the heads in opposite directions: float64, choices, and refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.context_parallel.timeline import HopSteps, Timeline
from maxattn.errors import MaxattnError
from tests.cases import both, draw_operands, judge_call
from tests.golden_text import check_golden, check_refused
from tests.jaxprs import of_primitive
from tests.waiting import but


def config(direction: str, n: int, **more: Any) -> ma.AttentionConfig:
    usual: Any = {"attention": "ring", "attention_kernel": "dot_product"} | more
    sizes = {"ici_data_parallelism": 1, "ici_context_parallelism": n}
    return ma.AttentionConfig(**usual, **sizes, ring_direction=direction)


def attend(cfg: ma.AttentionConfig, n: int, mask: M.Mask | None = None) -> Any:
    """Return attention with its LSE over n devices."""
    mesh = cfg.make_mesh(jax.devices()[:n])
    return partial(ma.attention, mask=mask, config=cfg, mesh=mesh, return_lse=True)


IDS = np.repeat(np.arange(4, dtype=np.int32), 6)[None].repeat(2, 0)
SMALL = {"block_q": 128, "block_kv": 128}
# ranks, length, heads, key heads, mask, and settings
CASES: dict[str, tuple[int, int, int, int, M.Mask | None, dict[str, Any]]] = {
    "odd ranks, a length that they do not divide": (5, 33, 4, 2, None, {}),
    "three ranks, causal in zig-zag": (3, 61, 4, 2, M.Causal(), {}),
    "window that leaves hops out": (4, 32, 2, 2, M.LocalWindow(3, 3), {}),
    "segments": (3, 24, 2, 2, M.Segments(IDS, IDS) & M.Causal(), {}),
    "groups that exchange heads": (
        8, 64, 8, 4, M.Causal(), {"attention": "ulysses_ring", "ulysses_shards": 2},
    ),
    "tpu_flash": (
        3, 96, 4, 2, M.Causal(), {"attention_kernel": "tpu_flash", "flash_block_sizes": SMALL},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", but(CASES, ["segments", "three ranks, causal in zig-zag"]))
def test_both_ways_against_float64(name: str) -> None:
    n, length, heads, kv_heads, mask, more = CASES[name]
    x = draw_operands(2, length, length, heads, kv_heads, h=16)
    judge_call(attend(config("both_ways", n, **more), n, mask), x, mask)


def sends(direction: str, n: int) -> list[Any]:
    """Return the permutes of a forward and its backward."""
    x = draw_operands(2, 8 * n, 8 * n, 4, 4, h=16)
    step = partial(both, attend(config(direction, n), n), x)
    return of_primitive(jax.make_jaxpr(step)(x["q"], x["k"], x["v"]).jaxpr, "ppermute")


@pytest.mark.parametrize("n", [3, 4])
def test_half_of_each_hop_goes_each_way(n: int) -> None:
    sent = sends("both_ways", n)
    next_one = tuple((i, (i + 1) % n) for i in range(n))
    one_before = tuple((i, (i - 1) % n) for i in range(n))
    ways = [tuple(eqn.params["perm"]) for eqn in sent]
    assert set(ways) == {next_one, one_before} and ways.count(next_one) == len(ways) // 2
    assert {eqn.invars[0].aval.shape[2] for eqn in sent} == {2}  # of four heads
    assert {tuple(eqn.params["perm"]) for eqn in sends("one_way", n)} == {next_one}


# ---- which one is chosen -------------------------------------------------------------------------

V6E, V5P = ma.Target.named("TPU v6e"), ma.Target.named("TPU v5p")


def decided(
    n: int, target: ma.Target = V6E, length: int = 32760, heads: int = 40, **more: Any
) -> ma.Plan:
    mask, kv_heads = more.pop("mask", None), more.pop("kv_heads", heads)
    bias = more.pop("bias", None)
    cfg = ma.AttentionConfig(**{"attention": "ring", **more})
    shape = jax.ShapeDtypeStruct
    q, k = (shape((1, length, heads_, 128), jnp.bfloat16) for heads_ in (heads, kv_heads))
    return ma.plan(ma.Call.of(q, k, mask=mask, bias=bias), cfg, {"context": n}, target)


CHOSEN = {
    "wan_480p": lambda: decided(8),
    "wan_480p_causal": lambda: decided(8, mask=M.Causal()),
    "asked": lambda: decided(8, V5P, 75_600, ring_direction="both_ways"),
    "asked_one_way": lambda: decided(8, ring_direction="one_way"),
    "covered": lambda: decided(8, V5P, 75_600),
    "one_key_head": lambda: decided(8, kv_heads=1, heads=8, length=8192),
    "few_heads_that_wait": lambda: decided(8, heads=5),
    "two_ranks": lambda: decided(2),
    "window": lambda: decided(8, mask=M.BlockSlidingWindow(1560, 7)),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_which_is_chosen(name: str) -> None:
    plan = CHOSEN[name]()
    notes = [note for note in plan.notes if "way" in note]
    check_golden(f"ring_direction/{name}", "\n".join([plan.strategy.label(), *notes]))


def test_exposed_seconds_by_hand() -> None:
    """Sending keys takes 3 s, gradients 6; the kernels beside them 2 s and 4, at the end 2."""
    forward = HopSteps(np.array([2.0, 2.0, 2.0]), np.array([3.0, 3.0, 0.0]))
    backward = HopSteps(np.array([2.0, 4.0, 4.0, 2.0]), np.array([3.0, 3.0 + 6.0, 6.0, 6.0]))
    line = Timeline(forward, backward, mean=18.0, starts=1.0, permutes=0.5)
    assert line.exposed == (1 + 1) + (1 + 5 + 2 + 4) + 1.0
    assert line.end == line.compute + line.exposed + 0.5 == 18 + 15 + 0.5


REFUSED = {
    "two_ranks": lambda: decided(2, ring_direction="both_ways"),
    "odd_heads": lambda: decided(4, heads=5, ring_direction="both_ways"),
    "heads_of_two_cores": lambda: decided(4, V5P, heads=10, ring_direction="both_ways"),
    "one_key_head": lambda: decided(4, heads=8, kv_heads=1, ring_direction="both_ways"),
    "bias": lambda: decided(
        4, length=4096, bias=jax.ShapeDtypeStruct((1, 1, 1, 4096), jnp.float32),
        ring_direction="both_ways", attention_kernel="dot_product",
    ),
    "table_a_head": lambda: decided(
        4, length=64, heads=4, ring_direction="both_ways", attention_kernel="dot_product",
        mask=M.Dense(np.ones((1, 4, 64, 64), bool)),
    ),
    "gpu": lambda: decided(4, ma.Target.named("NVIDIA H200"), ring_direction="both_ways"),
    "unknown": lambda: decided(4, ring_direction="both"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    check_refused(f"ring_direction/refused_{name}", MaxattnError, REFUSED[name])


def test_it_has_no_effect_without_a_ring() -> None:
    plan = decided(4, attention="ulysses", ring_direction="one_way")
    said = "ring_direction has no effect: only read by ring and ulysses_ring"
    assert any(said in note for note in plan.notes), plan.notes
