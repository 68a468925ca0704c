"""The matrix: every kernel against float64, forward, dq, dk, dv, dbias and the gradient of the LSE."""

from __future__ import annotations

import pytest

import maxattn as ma
from tests.cases import BIASES, LENGTHS, MASKS, judge, run_case
from tests.pairwise import pairwise, product

BLOCKWISE = {"attention": "dot_product", "use_memory_efficient_attention": True}
KERNELS = {
    "dense": {"attention": "dot_product"},
    "dense folded": {"attention": "dot_product", "split_head_dim": False, "float32_qk_product": True},
    "blockwise": BLOCKWISE,
    "blockwise 16x24": BLOCKWISE | {"query_chunk_size": 16, "key_chunk_size": 24},
}
AXES = {
    "kernel": list(KERNELS),
    "mask": list(MASKS),
    "dtype": ["float32", "bfloat16", "float16"],
    "heads": ["mha", "gqa", "mqa"],
    "length": list(LENGTHS),
    "head_dim": [40, 64, 72, 80, 96, 128, 160, 256],
    "bias": list(BIASES),
    "batch": [1, 3],
}


def legal(case: dict) -> bool:
    """Every combination is: no kernel here refuses anything."""
    return True


def name(case: dict) -> str:
    return "-".join(str(v).replace(" ", "_") for v in case.values())


@pytest.mark.parametrize("case", pairwise(AXES, legal), ids=name)
def test_pairs(case: dict) -> None:
    config = ma.AttentionConfig(**KERNELS[case["kernel"]])
    judge(case, run_case(case, config))


# The issue's own list in full: kernels x masks x heads x dtypes at an odd length.
PRODUCT = product(AXES | {"length": ["odd"], "head_dim": [64], "bias": ["none"], "batch": [3]}, legal)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=name)
def test_product(case: dict) -> None:
    config = ma.AttentionConfig(**KERNELS[case["kernel"]])
    judge(case, run_case(case, config))


# Splash in interpret mode is slow, so it has a selection of its own, of what it does not refuse (test_flash.py does).
FLASH = {
    "flash": {"attention": "flash"},
    "flash fused": {"attention": "flash", "flash_block_sizes": {"use_fused_bwd_kernel": True, "block_kv_compute": 128}},
    "flash float32": {"attention": "flash", "float32_qk_product": True},
}
FLASH_AXES = AXES | {
    "kernel": list(FLASH),
    "mask": [m for m in MASKS if m not in ("dense", "dense heads", "not segments")],
    "bias": ["none"],
}  # fmt: skip


@pytest.mark.parametrize("case", pairwise(FLASH_AXES, legal), ids=name)
def test_flash_pairs(case: dict) -> None:
    config = ma.AttentionConfig(**FLASH[case["kernel"]])
    judge(case, run_case(case, config))
