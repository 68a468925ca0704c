"""`context_parallel: auto`: the arithmetic, held against what was measured, and what it decides."""

from __future__ import annotations

import jax
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.context.choose import CANDIDATES, fastest
from maxattn.context.cost import Cost, cost_of
from maxattn.context.figures import MACHINES, machine_of
from maxattn.target import KNOWN

CONFIG = ma.AttentionConfig(attention="dot_product")


def call(tokens: int, heads: int, mask: M.Mask | None = None) -> ma.Call:
    x = jax.ShapeDtypeStruct((1, tokens, heads, 128), "bfloat16")
    return ma.Call.of(x, x, mask=mask)


def chosen(tokens: int, heads: int, context: int, target: str, mask: M.Mask | None = None) -> ma.Plan:
    return ma.plan(call(tokens, heads, mask), CONFIG, {"context": context}, ma.Target.named(target))


@pytest.mark.parametrize(
    ("tokens", "heads", "gathered", "exchanged"), [(32768, 40, 0.891, 0.911), (75776, 40, 0.951, 0.967)]
)
def test_the_sums_are_near_what_four_h200s_took(tokens: int, heads: int, gathered: float, exchanged: float) -> None:
    """Efficiency of forward and backward on four, against a quarter of one: measured with cuDNN."""
    shape, target = (("context", 4),), ma.Target.named("NVIDIA H200")
    for name, measured in (("all_gather", gathered), ("ulysses", exchanged)):
        one = call(tokens, heads)
        cost = cost_of(CANDIDATES[name].build(shape, CONFIG, one, target), one, machine_of(target))
        assert cost.compute / cost.step == pytest.approx(measured, abs=0.04)


def test_what_it_decides() -> None:
    assert chosen(32768, 40, 4, "NVIDIA H200").context.name == "ulysses"
    assert chosen(32768, 6, 4, "NVIDIA H200").context.name == "ring", "6 heads do not divide over 4"
    assert chosen(256, 8, 4, "NVIDIA H200").context.name == "all_gather", "the start of a transfer outweighs its bytes"
    assert chosen(1_000_000, 40, 16, "TPU v5p").context.name == "ring", "gathered keys take over half of the memory"
    causal = chosen(131072, 12, 8, "TPU v5p", M.Causal())
    assert (causal.context.name, causal.context.runs) == ("ring", 2)


def test_the_plan_prints_every_sum_and_where_the_figures_are_from() -> None:
    text = chosen(32768, 6, 4, "TPU v5p").explain()
    for part in (
        "context_parallel: auto is",
        "not measured by us",
        "all_gather: ",
        "ring: ",
        "ms a step = ",
        "6 heads",
    ):
        assert part in text


def test_memory_comes_before_time_and_the_simplest_of_equals_before_others() -> None:
    costs = {
        "all_gather": Cost("all_gather", 1.0, 0.0, 9.0), "ulysses": Cost("ulysses", 1.0, 0.51, 5.0),
        "ring": Cost("ring", 1.0, 0.5, 2.0),
    }  # fmt: skip
    assert [fastest(costs, limit) for limit in (10, 6, 3, 1)] == ["all_gather", "ulysses", "ring", "ring"]


def test_every_known_machine_has_figures_with_a_source() -> None:
    assert set(MACHINES) == set(KNOWN)
    assert all(m.source and min(m.flops, m.memory, m.hbm, m.neighbour, m.gather) > 0 for m in MACHINES.values())
