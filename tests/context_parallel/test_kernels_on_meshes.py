"""Every kernel with every strategy: float32 against float64, bfloat16 against one device.

`make test` runs a few cases with the Pallas kernels, in interpret mode.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest

import maxattn as ma
from tests.cases import MASKS, judge, run_case
from tests.pairwise import name_of, product
from tests.reference import mean_error
from tests.waiting import but

KERNELS: dict[str, dict[str, Any]] = {
    "dot_product": {},
    "memory_efficient": {
        "use_memory_efficient_attention": True, "query_chunk_size": 8, "key_chunk_size": 24,
    },
    "flash": {},
    "tokamax_flash": {},
    "tpu_flash": {},
}  # fmt: skip
# Tables, and arrays under ~, are refused by the Pallas kernels: tests/kernels.
REFUSED = {"dense", "dense heads", "not segments"}
PRODUCT = {
    "strategy": ["all_gather", "ring", "ulysses", "ulysses_ring"],
    "kernel": list(KERNELS),
    "mask": list(MASKS),
    "size": [1, 2, 4, 8],
    "length": ["odd"],
    "dtype": ["float32"],
}
# tpu_flash does with a mask what flash does. On one device no strategy runs.
SMALL = (
    ("ring", "flash", "segments", 2, "cross", "float32"),
    ("all_gather", "tpu_flash", "causal", 2, "odd", "bfloat16"),
    ("ulysses", "tokamax_flash", "lengths", 4, "odd", "float32"),
    ("ulysses_ring", "tokamax_flash", "block window", 4, "odd", "float32"),
)
CASES = [dict(zip(PRODUCT, row, strict=True)) for row in SMALL]


def legal(case: dict) -> bool:
    several = case["size"] > 1 or case["strategy"] == "ring"
    pallas = case["kernel"] not in ("dot_product", "memory_efficient")
    return several and not (pallas and case["mask"] in REFUSED)


def config(case: dict, context: int) -> ma.AttentionConfig:
    kernel = "dot_product" if case["kernel"] == "memory_efficient" else case["kernel"]
    return ma.AttentionConfig(
        attention=kernel,
        context_parallel=case["strategy"] if context > 1 else "auto",
        ici_data_parallelism=1,
        ici_context_parallelism=context,
        **KERNELS[case["kernel"]],
    )


ROUNDED = [case | {"dtype": "bfloat16"} for case in CASES if case["dtype"] == "float32"]
ALL = [*CASES, *ROUNDED, *(case for case in product(PRODUCT, legal) if case not in CASES)]


@pytest.mark.parametrize("case", but(ALL, CASES), ids=name_of)
def test_product(case: dict) -> None:
    if case["kernel"] == "tokamax_flash":
        pytest.importorskip("tokamax")
    whole = case | {"batch": 1, "heads": "8 of 2", "head_dim": 16, "bias": "none"}
    spread = config(case, case["size"])
    mesh = spread.make_mesh(jax.devices()[: case["size"]]) if case["size"] > 1 else None
    if case["dtype"] == "float32":
        judge(whole, run_case(whole, spread, mesh))
        return
    ours = run_case(whole, spread, mesh, measure=mean_error)
    own = run_case(whole, config(case, 1), measure=mean_error)
    over = {key: (error, own[key]) for key, error in ours.items() if error > 1.5 * own[key] + 1e-6}
    assert not over, f"{case}: error on the mesh and on one device {over}"
