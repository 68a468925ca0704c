"""Every kernel inside every context strategy: float32 against float64, bfloat16 against the kernel
on one device.

`make test` runs pairs with the Pallas kernels, in interpret mode; `make test-all` the product with
all kernels.
"""

from __future__ import annotations

from typing import Any

import pytest

import maxattn as ma
from tests.cases import MASKS, judge, run_case
from tests.pairwise import pairwise, plainly, product
from tests.reference import mean_error
from tests.waiting import but, enough

KERNELS: dict[str, dict[str, Any]] = {
    "dot_product": {},
    "memory_efficient": {
        "use_memory_efficient_attention": True,
        "query_chunk_size": 8,
        "key_chunk_size": 24,
    },
    "flash": {},
    "tokamax_flash": {},
    "tpu_flash": {},
}
STRATEGIES = ["all_gather", "ring", "ulysses", "ulysses_ring"]
# Tables, and arrays under ~, are refused by the Pallas kernels: tests/kernels.
REFUSED = {"dense", "dense heads", "not segments"}
PAIRS = {
    "strategy": STRATEGIES,
    "kernel": ["flash", "tokamax_flash"],
    "mask": ["full", "causal", "block window", "lengths", "segments"],
    "size": [2, 4],
    "length": ["odd", "cross"],
    "dtype": ["float32", "bfloat16"],
}
PRODUCT = {
    "strategy": STRATEGIES,
    "kernel": list(KERNELS),
    "mask": list(MASKS),
    "size": [1, 2, 4, 8],
    "length": ["odd"],
    "dtype": ["float32"],
}
NO_LLVM = {
    "xla_backend_optimization_level": 0
}  # the interpreter's long programs compile in half the time


def legal(case: dict) -> bool:
    return case["mask"] not in REFUSED or case["kernel"] in ("dot_product", "memory_efficient")


def distinct(case: dict) -> bool:
    """On one device no strategy runs: one name for it will do."""
    return legal(case) and (case["size"] > 1 or case["strategy"] == "ring")


def rounded_between(case: dict) -> bool:
    """In bfloat16 a case runs twice: for what adds up gradients or results of several devices."""
    return legal(case) and (
        case["dtype"] == "float32" or case["strategy"] in ("ring", "all_gather")
    )


def name(case: dict) -> str:
    return "-".join(str(v).replace(" ", "_") for v in case.values())


def config(case: dict, context: int) -> ma.AttentionConfig:
    kernel = "dot_product" if case["kernel"] == "memory_efficient" else case["kernel"]
    return ma.AttentionConfig(
        attention=kernel,
        context_parallel=case["strategy"] if context > 1 else "auto",
        ici_data_parallelism=8 // case["size"] if context > 1 else 1,
        ici_context_parallelism=context,
        **KERNELS[case["kernel"]],
    )


def check(case: dict) -> None:
    if case["kernel"] == "tokamax_flash":
        pytest.importorskip("tokamax")
    whole = case | {"batch": 8 // case["size"], "heads": "8 of 2", "head_dim": 16, "bias": "none"}
    spread = config(case, case["size"])
    mesh = spread.make_mesh() if case["size"] > 1 else None
    if case["dtype"] == "float32":
        judge(whole, run_case(whole, spread, mesh, compiler_options=NO_LLVM))
        return
    ours = run_case(whole, spread, mesh, compiler_options=NO_LLVM, measure=mean_error)
    own = run_case(whole, config(case, 1), compiler_options=NO_LLVM, measure=mean_error)
    over = {key: (error, own[key]) for key, error in ours.items() if error > 1.5 * own[key] + 1e-6}
    assert not over, f"{case}: error on the mesh and on one device {over}"


# A case in bfloat16 runs twice, and hops over four devices compile longer than over two.
# A ring meets every mask, on two devices: tests/kernels has rings of three. What gathers keys or
# heads sees positions as one device does.
CORE = ("strategy", "kernel")
OTHERS = {"strategy": [s for s in STRATEGIES if s != "ring"], "mask": ["causal", "lengths"]}
FEW = pairwise(PAIRS | {"strategy": ["ring"], "size": [2]}, legal, core=CORE)
FEW += pairwise(PAIRS | OTHERS, rounded_between, core=CORE)
for axis, plain in (("dtype", "float32"), ("size", 2)):
    FEW = plainly(FEW, axis, plain, rounded_between, CORE)
# What tpu_flash does to a mask on several devices is the work of flash's code: each strategy once.
OWN = {"kernel": ["tpu_flash"], "size": [2], "dtype": ["float32"]}
for strategy, mask, length in (
    ("ring", "segments", "cross"),
    ("ulysses_ring", "block window", "odd"),
    ("all_gather", "block window", "odd"),
    ("ulysses", "segments", "odd"),
):
    just = {"strategy": [strategy], "mask": [mask], "length": [length]}
    FEW += product(PAIRS | OWN | just, legal)


# Every strategy meets every kernel, but ulysses_ring flash alone, the others' code in one, and ring
# no tokamax_flash: tests/kernels/test_tokamax.py merges its shards. A mask meets each kernel in
# tests/kernels.
LEFT = [("ulysses_ring", "tokamax_flash"), ("ulysses_ring", "tpu_flash"), ("ring", "tokamax_flash")]
QUICK = [case for case in FEW if (case["strategy"], case["kernel"]) not in LEFT]


@pytest.mark.parametrize("case", but(FEW, enough(QUICK, ("strategy", "kernel"))), ids=name)
def test_pairs(case: dict) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", product(PRODUCT, distinct), ids=name)
def test_product(case: dict) -> None:
    check(case)
