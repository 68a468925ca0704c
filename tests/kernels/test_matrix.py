"""The matrix: every kernel against float64, with gradients of q, k, v, bias and LSE."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from tests.cases import BIASES, KINDS, LENGTHS, MASKS, draw_operands, judge, judge_call, run_case
from tests.pairwise import name_of, pairwise, product
from tests.waiting import but, few, slow

BLOCKWISE = {"attention": "dot_product", "use_memory_efficient_attention": True}
FLASH, TOKAMAX = {"attention": "flash"}, {"attention": "tokamax_flash"}
FUSED = {"use_fused_bwd_kernel": True, "block_kv_compute": 128}
SMALL = {"block_q": 128, "block_kv": 128}  # several tiles at these lengths
EXP2 = TOKAMAX | {"use_base2_exp": True}
KERNELS = {
    "dense": {"attention": "dot_product"},
    "dense folded": {
        "attention": "dot_product", "split_head_dim": False, "float32_qk_product": True
    },
    "blockwise": BLOCKWISE,
    "blockwise 16x24": BLOCKWISE | {"query_chunk_size": 16, "key_chunk_size": 24},
    "flash": FLASH,
    "flash fused": FLASH | {"flash_block_sizes": FUSED},
    "flash float32": FLASH | {"float32_qk_product": True},
    "tokamax_flash": TOKAMAX | {"flash_block_sizes": SMALL},
    "tokamax_flash exp2": EXP2,
    "tokamax_flash exp2 float32": EXP2 | {"float32_qk_product": True},
}  # fmt: skip
OF_XLA, OF_FLASH, OF_TOKAMAX = (
    [x for x in KERNELS if x.startswith(names)] for names in (("dense", "block"), "flash", "tok")
)
AXES = {
    "kernel": OF_XLA,
    "mask": list(MASKS),
    "dtype": ["float32", "bfloat16", "float16"],
    "heads": ["mha", "gqa", "mqa"],
    "length": list(LENGTHS),
    "head_dim": [40, 64, 72, 80, 96, 128, 160, 256],
    "bias": list(BIASES),
    "batch": [1, 3],
}


def legal(case: dict) -> bool:
    """Every combination is legal: no kernel here refuses any."""
    return True


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


# Splash in interpret mode is slow, so each has a selection of its own, of what it does not refuse
# (their tests do).
SPLASH = {
    "mask": [m for m in MASKS if m not in ("dense", "dense heads", "not segments")],
    "bias": ["none"],
}
FLASH_AXES = AXES | SPLASH | {"kernel": OF_FLASH, "head_dim": [40, 72, 80, 128, 160, 256]}
TOKAMAX_AXES = FLASH_AXES | {
    "kernel": OF_TOKAMAX,
    "length": ["odd", "one", "cross", "short"],
    "head_dim": [40, 72, 128, 256],
}
# Its sizes are padded to tiles and registers: one of each kind.
FEW_FLASH = {
    "mask": [m for m in KINDS if m in SPLASH["mask"]],
    "length": ["odd", "one", "cross", "short"],
    "head_dim": [40, 80, 128, 256],
}
FLASH_PAIRS = pairwise(FLASH_AXES | FEW_FLASH, legal, core=("kernel", "dtype"))
FLASH_REST = {"mask": [m for m in REST["mask"] if m in SPLASH["mask"]], "kernel": ["flash"]}
FLASH_PAIRS += pairwise(FLASH_AXES | FLASH_REST, legal, core=("kernel", "dtype"))
# tokamax_flash has the masks of flash, which meets all of them: one of each kind.
FEW_TOKAMAX = TOKAMAX_AXES | {"mask": FEW_FLASH["mask"]}
TOKAMAX_PAIRS = pairwise(FEW_TOKAMAX, legal, core=("bias", "kernel", "dtype"))
# A mask is applied alike in every dtype and beside every bias, and is lists of tiles before splash
# sees it: the other pairs are make test-all's.
FEW = [
    *few(PAIRS),
    *few(FLASH_PAIRS),
    *few(TOKAMAX_PAIRS),
]
# Kernels x masks x heads x dtypes in full: at an odd length, and in splash at 129 queries (two
# tiles of 128) and a head dim that is no whole register.
ODD = {"length": ["odd"], "head_dim": [64], "bias": ["none"], "batch": [3]}
SHORT = {"length": ["short"], "head_dim": [96], "batch": [2], "kernel": OF_FLASH + OF_TOKAMAX}
ALL = [case for axes in (AXES, FLASH_AXES, TOKAMAX_AXES) for case in pairwise(axes, legal)]
ALL += [*product(AXES | ODD, legal), *product(AXES | SPLASH | SHORT, legal)]


@pytest.mark.parametrize("case", [*FEW, *slow(ALL)], ids=name_of)
def test_against_float64(case: dict) -> None:
    if case["kernel"] in OF_TOKAMAX:
        pytest.importorskip("tokamax")
    judge(case, run_case(case, ma.AttentionConfig(**KERNELS[case["kernel"]])))


LENGTHS_OF_TEXTS = (1, 77, 226, 257, 300, 333, 600, 1000, 1300)


@pytest.mark.parametrize(
    ("kernel", "length"),
    but(itertools.product(("flash", "tokamax_flash"), LENGTHS_OF_TEXTS), [("flash", 1300)]),
)
def test_texts_of_every_length_that_models_have(kernel: str, length: int) -> None:
    """77 queries of a text of `length` tokens; the second batch row has two thirds of them."""
    if kernel == "tokamax_flash":
        pytest.importorskip("tokamax")
    sizes = {"block_kv": 512, "block_kv_compute": 256}
    config = ma.AttentionConfig(cross_attention=kernel, flash_block_sizes=sizes)
    mask = M.KeyPadding(np.array([length, -(-2 * length // 3)], np.int32))
    x = draw_operands(b=2, t=77, s=length, n=2, k=2, h=64)
    call = partial(ma.attention, mask=mask, config=config, role="cross", return_lse=True)
    judge_call(call, x, mask)
