"""A fixed draw of every category: nothing but right, refused, or a fault that is known."""

from __future__ import annotations

import time

import pytest

from tests.fuzz.categories import CATEGORIES, draw
from tests.fuzz.machine import describe
from tests.fuzz.run import TimeIsUp, run, time_limit
from tests.fuzz.table import table

SEED = 19
CASES = {
    "attention": 8, "meshes": 4, "transforms": 6, "modules": 2, "plans": 60, "commands": 60,
    "yaml": 80, "weights": 60, "lora": 60, "latents": 30,
    "checkpoints": 12, "tuned": 10,
}  # fmt: skip
PARTS = 2  # so that both cores have work
COMPILE = ("attention", "meshes", "transforms", "modules")
# Of what compiles, the second part is drawn by make test-all.
DRAWN = [
    pytest.param(name, part, marks=[pytest.mark.slow] if part and name in COMPILE else [])
    for name in CATEGORIES
    for part in range(PARTS)
]


@pytest.mark.parametrize(("name", "part"), DRAWN)
def test_no_third_outcome(name: str, part: int) -> None:
    first, many = SEED * 1_000_000, CASES[name]
    seeds = range(first + part, first + many, PARTS)
    outcomes = [run(draw(name, seed, describe())) for seed in seeds]
    print(table(outcomes))
    failed = [outcome.snippet for outcome in outcomes if outcome.kind == "failed"]
    assert not failed, "\n\n".join(failed)
    assert any(outcome.kind == "right" for outcome in outcomes)


def test_only_what_a_case_computes_counts_as_its_time() -> None:
    with time_limit(0.1):
        time.sleep(0.3)
    with pytest.raises(TimeIsUp), time_limit(0.1):
        while True:
            pass
    with pytest.raises(TimeIsUp), time_limit(0.1, latest=0.3):
        time.sleep(10)
