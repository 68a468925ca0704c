"""The matrix on an NVIDIA GPU (`make test-gpu`): fused kernels are right, or raise."""

from __future__ import annotations

import jax
import pytest

import maxattn as ma
from maxattn.errors import Unsupported
from tests.cases import LENGTHS, MASKS, judge, run_case
from tests.gpu.requirements import skip_unless_available
from tests.pairwise import name_of, pairwise

pytestmark = pytest.mark.gpu

KERNELS = ["cudnn", "cudnn_flash_te", "flash", "tokamax_flash"]
AXES = {
    "kernel": KERNELS,
    "mask": list(MASKS),
    "dtype": ["bfloat16", "float16"],
    "heads": ["mha", "gqa", "mqa"],
    "length": list(LENGTHS),
    "head_dim": [40, 64, 72, 80, 96, 128, 160, 256],
    "bias": ["none"],
    "batch": [1, 3],
}


@pytest.mark.parametrize("case", pairwise(AXES, lambda case: True), ids=name_of)
def test_pairs(case: dict, record_property) -> None:
    skip_unless_available(case["kernel"])
    config = ma.AttentionConfig(attention=case["kernel"])
    try:
        errors = run_case(case, config)
    except Unsupported as refused:
        assert case["kernel"] in str(refused) and refused.args, refused
        record_property("refused", str(refused))
        return
    record_property("errors", errors)
    jax.clear_caches()
    judge(case, errors)
