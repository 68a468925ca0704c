"""The matrix: every kernel against float64, forward, dq, dk, dv, dbias and the gradient of the
LSE.
"""

from __future__ import annotations

import importlib.util

import pytest

import maxattn as ma
from tests.cases import BIASES, KINDS, LENGTHS, MASKS, judge, run_case
from tests.pairwise import pairwise, product
from tests.waiting import few

BLOCKWISE = {"attention": "dot_product", "use_memory_efficient_attention": True}
KERNELS = {
    "dense": {"attention": "dot_product"},
    "dense folded": {
        "attention": "dot_product",
        "split_head_dim": False,
        "float32_qk_product": True,
    },
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


# What a kernel's code depends on; sizes and heads meet every kernel, and each other only in
# test_all_pairs.
CORE = ("kernel", "mask", "dtype", "bias")
# Masks of one kind share their code, and dense reads their tables: the others meet chunks, and few
# biases.
REST = {"mask": [m for m in MASKS if m not in KINDS]}
PLAIN = {"kernel": ["blockwise 16x24"], "bias": ["none", "full", "shared"]}
KINDS_OF_BIAS = [bias for bias in BIASES if bias != "shared"]  # a full one, of fewer rows
PAIRS = pairwise(AXES | {"mask": KINDS, "bias": KINDS_OF_BIAS}, legal, core=CORE)
PAIRS += pairwise(AXES | REST | PLAIN, legal, core=("kernel", "dtype"))


# A mask is applied alike in every dtype and beside every bias: those pairs are test_all_pairs',
# which make test-all runs.
@pytest.mark.parametrize(
    "case", few(PAIRS, ("kernel", "dtype"), ("kernel", "bias"), ("kernel", "mask")), ids=name
)
def test_pairs(case: dict) -> None:
    judge_xla(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(AXES, legal), ids=name)
def test_all_pairs(case: dict) -> None:
    judge_xla(case)


def judge_xla(case: dict) -> None:
    judge(case, run_case(case, ma.AttentionConfig(**KERNELS[case["kernel"]])))


# The issue's own list in full: kernels x masks x heads x dtypes at an odd length.
PRODUCT = product(
    AXES | {"length": ["odd"], "head_dim": [64], "bias": ["none"], "batch": [3]}, legal
)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=name)
def test_product(case: dict) -> None:
    judge_xla(case)


# Splash in interpret mode is slow, so each has a selection of its own, of what it does not refuse
# (their tests do).
FLASH = {
    "flash": {"attention": "flash"},
    "flash fused": {
        "attention": "flash",
        "flash_block_sizes": {"use_fused_bwd_kernel": True, "block_kv_compute": 128},
    },
    "flash float32": {"attention": "flash", "float32_qk_product": True},
}
SMALL = {"block_q": 128, "block_kv": 128}  # several tiles at these lengths
TOKAMAX = {
    "tokamax_flash": {"attention": "tokamax_flash", "flash_block_sizes": SMALL},
    "tokamax_flash exp2": {"attention": "tokamax_flash", "use_base2_exp": True},
    "tokamax_flash exp2 float32": {
        "attention": "tokamax_flash",
        "use_base2_exp": True,
        "float32_qk_product": True,
    },
}
SPLASH = {
    "mask": [m for m in MASKS if m not in ("dense", "dense heads", "not segments")],
    "bias": ["none"],
}
FLASH_AXES = AXES | SPLASH | {"kernel": list(FLASH), "head_dim": [40, 72, 80, 128, 160, 256]}
TOKAMAX_AXES = (
    AXES
    | SPLASH
    | {
        "kernel": list(TOKAMAX),
        "length": ["odd", "one", "cross", "short"],
        "head_dim": [40, 72, 128, 256],
    }
)
needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed"
)


def judge_splash(case: dict) -> None:
    """Run a case; the interpreter's long programs compile in half the time without LLVM's
    optimizations.
    """
    config = ma.AttentionConfig(**(FLASH | TOKAMAX)[case["kernel"]])
    judge(case, run_case(case, config, compiler_options={"xla_backend_optimization_level": 0}))


# Its sizes are padded to tiles and registers: one of each kind.
FEW_FLASH = {
    "mask": [m for m in KINDS if m in SPLASH["mask"]],
    "length": ["odd", "one", "cross", "short"],
    "head_dim": [40, 80, 128, 256],
}
FLASH_PAIRS = pairwise(FLASH_AXES | FEW_FLASH, legal, core=("kernel", "dtype"))
FLASH_REST = {"mask": [m for m in REST["mask"] if m in SPLASH["mask"]], "kernel": ["flash"]}
FLASH_PAIRS += pairwise(FLASH_AXES | FLASH_REST, legal, core=("kernel", "dtype"))


# Every mask and size, and every dtype in every kernel; masks are lists before a kernel sees them:
# test_all_flash_pairs has each of them in each.
@pytest.mark.parametrize("case", few(FLASH_PAIRS, ("kernel", "dtype")), ids=name)
def test_flash_pairs(case: dict) -> None:
    judge_splash(case)


# tokamax_flash has the masks of flash, which meets all of them: one of each kind.
FEW_TOKAMAX = TOKAMAX_AXES | {"mask": FEW_FLASH["mask"]}


@needs_tokamax
@pytest.mark.parametrize(
    "case",
    few(pairwise(FEW_TOKAMAX, legal, core=("bias", "kernel", "dtype")), ("kernel", "mask")),
    ids=name,
)
def test_tokamax_pairs(case: dict) -> None:
    judge_splash(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(FLASH_AXES, legal), ids=name)
def test_all_flash_pairs(case: dict) -> None:
    judge_splash(case)


@pytest.mark.slow
@needs_tokamax
@pytest.mark.parametrize("case", pairwise(TOKAMAX_AXES, legal), ids=name)
def test_all_tokamax_pairs(case: dict) -> None:
    judge_splash(case)


# Kernels x masks x heads x dtypes, at 129 queries (two tiles of 128) and a head dim that is no
# whole register.
SPLASH_FEW = {"length": ["short"], "head_dim": [96], "batch": [2]}
SPLASH_PRODUCT = product(AXES | SPLASH | SPLASH_FEW | {"kernel": [*FLASH, *TOKAMAX]}, legal)


@pytest.mark.slow
@pytest.mark.parametrize("case", SPLASH_PRODUCT, ids=name)
def test_splash_product(case: dict) -> None:
    if case["kernel"] in TOKAMAX:
        pytest.importorskip("tokamax")
    judge_splash(case)
