"""Context strategies over the GPU kernels, on two GPUs, against float64: a ring cuts hops into full and diagonal."""

from __future__ import annotations

import pytest

import maxattn as ma
from maxattn.errors import Unsupported
from tests.cases import judge, run_case
from tests.gpu.there import skip_unless_there
from tests.pairwise import product

pytestmark = pytest.mark.gpu

AXES = {
    "kernel": ["cudnn", "cudnn_flash_te", "flash", "tokamax_flash"],
    "strategy": ["ring", "all_gather", "ulysses"],
    "mask": ["full", "causal", "lengths", "causal & lengths", "block window", "segments"],
    "length": ["64", "odd"],
}
FIXED = {"dtype": "bfloat16", "head_dim": 64, "batch": 2, "heads": "mha", "bias": "none"}


@pytest.mark.parametrize("case", product(AXES, lambda case: True), ids=lambda c: "-".join(map(str, c.values())))
def test_two_gpus(case: dict, record_property) -> None:
    skip_unless_there(case["kernel"], devices=2)
    config = ma.AttentionConfig(
        attention=case["kernel"], context_parallel=case["strategy"], ici_context_parallelism=2, ici_data_parallelism=1
    )
    case = case | FIXED
    try:
        errors = run_case(case, config, config.make_mesh())
    except Unsupported as refused:
        assert case["kernel"] in str(refused)
        record_property("refused", str(refused))
        return
    judge(case, errors)
