"""A fixed draw of every category: every case is right, refused, or a known fault."""

from __future__ import annotations

import gc
import time

import pytest

from tests.fuzz.loop import CATEGORIES, draw, table
from tests.fuzz.run import TimeIsUp, describe, run, time_limit

SEED = 24
CASES = {
    "attention": 3, "meshes": 3, "transforms": 1, "modules": 2, "streams": 1, "plans": 30,
    "commands": 60, "yaml": 80, "weights": 40, "lora": 40, "latents": 30, "checkpoints": 12,
    "tuned": 6, "remedies": 40, "stacked": 1, "writers": 1,
}  # fmt: skip
# Of what compiles, as many again are drawn by make test-all.
MORE = [pytest.param(x, 1, marks=pytest.mark.slow) for x in list(CASES)[:5]]
SLOW = ("stacked", "streams", "writers")  # their own tests draw less and are quicker
EACH = [
    *(pytest.param(x, 0, marks=pytest.mark.slow) if x in SLOW else (x, 0) for x in CATEGORIES),
    *MORE,
]


@pytest.mark.parametrize(("name", "part"), EACH)
def test_no_third_outcome(name: str, part: int) -> None:
    gc.freeze()  # a case of "commands" collects garbage: 3 s for the objects of earlier tests
    first = SEED * 1_000_000 + part * CASES[name]
    seeds = range(first, first + CASES[name])
    outcomes = [run(draw(f"{name}:{seed}", describe())) for seed in seeds]
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
