"""GPU kernels in jax's 64-bit mode, which changes no dtype of a result (`make test-gpu`)."""

from __future__ import annotations

import jax
import pytest

import maxattn as ma
from maxattn.errors import Unsupported
from tests.cases import judge, run_case
from tests.gpu.requirements import skip_unless_available
from tests.gpu.test_matrix import KERNELS

pytestmark = pytest.mark.gpu

CASE = {"dtype": "bfloat16", "heads": "gqa", "length": "odd", "head_dim": 64, "batch": 3}


@pytest.mark.parametrize("mask", ["full", "causal & lengths", "block window", "segments"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_results_are_right(kernel: str, mask: str) -> None:
    skip_unless_available(kernel)
    case = CASE | {"kernel": kernel, "mask": mask, "bias": "none"}
    with jax.enable_x64(True):
        try:
            errors = run_case(case, ma.AttentionConfig(attention=kernel))
        except Unsupported as refused:
            pytest.skip(str(refused))
    judge(case, errors)
