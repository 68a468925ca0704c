"""The TPU's own compiler: adjusted sizes compile, and sizes that the rules forbid do not.

libtpu compiles without a TPU, for a given topology. If it is not installed, the tests are skipped;
MAXATTN_TPU_PYTHON may name the python of another environment that has jax[tpu]. `make
test-tpu-compile` runs all of it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from maxattn.block_sizes import DKV, FORWARD, BlockSizes
from maxattn.block_sizes.transposed import sizes_of
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.target import Target
from tests.block_sizes import matrix, presets_of_others
from tests.block_sizes.asks import CROSS_LENGTHS, call, uniform
from tests.block_sizes.compiler import TOPOLOGIES, Compiler
from tests.block_sizes.random_requests import HEAD_DIMS, LENGTHS, PRESETS, TEXTS, Request, requests
from tests.packages import needs_libtpu

pytestmark = needs_libtpu
COUNT = 330  # requests; 11 for each chip, kernel and backward


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    """One child process for the whole file."""
    with Compiler() as started:
        yield started


def say(text: str) -> None:
    """Report progress and counts, whether or not pytest captures."""
    print(text, file=sys.__stderr__, flush=True)


def of(
    kind: str, training: bool, asked: FlashBlockSizes | None = None, mask: str = "padding"
) -> Request:
    """Request sizes for long self-attention."""
    return Request(asked or FlashBlockSizes(), call(75_600), "flash", kind, training, mask)


def test_a_few_adjusted_sizes_compile(compiler):
    asked = (
        of("TPU v6e", False, FlashBlockSizes(block_q=3024, block_kv=512)),
        of("TPU v5p", True, uniform(256), "both"),
        of("TPU v5e", False, FlashBlockSizes(block_q=4096, block_kv=1000)),
    )
    assert [compiler.compile(one.case())["message"] for one in asked] == ["", "", ""]


def test_what_the_rules_forbid_does_not_compile(compiler):
    training = BlockSizes(3024, 512, 512, 3024, 512, 512, use_fused_bwd_kernel=True)
    forbidden = (
        (of("TPU v6e", True), training, "block_q must be a multiple of 128"),
        (of("TPU v5p", False), BlockSizes(512, 192, 192), "must be a multiple of 128"),
        (of("TPU v5p", False), BlockSizes(1001, 512, 512), "divisible by 8 and 128"),
        (of("TPU v5p", False), BlockSizes(2048, 2048, 2048), "vmem"),
    )
    for request, sizes, message in forbidden:
        result = compiler.compile(request.case(sizes))
        assert not result["ok"]
        assert message in result["message"]


@pytest.mark.slow
def test_random_requests_compile_once_adjusted(compiler):
    failed, keys = [], set()
    for n, request in enumerate(requests("random requests", COUNT), 1):
        result = compiler.compile(request.case())
        keys.add(result["key"])
        if not result["ok"]:
            failed.append((request, result["message"]))
        if n % 30 == 0:
            say(f"{n} requests, {len(keys)} programs, {len(failed)} failed")
    assert len(keys) >= 250
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ((3328, 640, 640), Call(1, 32_760, 600, 2, 2, 64, "float32", role="cross")),
        ((1152, 1536, 1536), Call(1, 75_600, 75_600, 2, 2, 128, "float32")),
    ],
)
def test_what_once_did_not_compile(compiler, asked, what):
    """v7x refused these in float32 with the constants of v6e."""
    keys = dict(zip((*FORWARD, *DKV), 2 * asked, strict=True))
    sizes = FlashBlockSizes(**keys, use_fused_bwd_kernel=True)
    request = Request(sizes, what, "flash", "TPU v7x", True, "both")
    assert compiler.compile(request.case())["message"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", matrix.KERNELS)
@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_the_matrix_compiles_at_full_length(compiler, kind, kernel):
    failed: dict[str, Any] = {}
    for name, case in matrix.cases(lambda name: name.startswith(f"{kind}, {kernel}, ")):
        result = matrix.judge(compiler, case)
        say(f"{name}: {'compiles' if result['ok'] else 'FAILS'} on {result['chips']}")
        if not result["ok"]:
            failed[name] = result["message"]
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize("kernel", matrix.KERNELS)
@pytest.mark.parametrize("kind", ["TPU v5p", "TPU v6e"])
def test_cross_attention_of_any_length_compiles(compiler, kind, kernel):
    cases = dict(matrix.cross_cases(kind, kernel, CROSS_LENGTHS))
    messages = {name: compiler.compile(case)["message"] for name, case in cases.items()}
    assert not any(messages.values()), messages


@pytest.mark.slow
@pytest.mark.parametrize("name", presets_of_others.PRESETS)
def test_what_others_publish_compiles_once_adjusted(compiler, name):
    for kind in presets_of_others.PRESETS[name].chips:
        request = presets_of_others.request_of(name, kind)
        assert compiler.compile(request.case())["message"] == ""


# ---- tpu_flash -----------------------------------------------------------------------------------

MASKS = ("full", "padding", "window", "both", "blocks")
OWN_COUNT, TRAINING = 300, 0.4


def case(
    kind: str, asked: FlashBlockSizes, call: Call, mask: str, training: bool
) -> dict[str, Any]:
    """Describe the compile of a request's adjusted tiles: two blocks of each, the last ragged."""
    both, _ = sizes_of(asked, call, Target.named(kind))
    forward = BlockSizes(both.block_q, both.block_kv, both.block_kv_compute)
    sizes = both if training else forward
    blocks = max(both.block_q, both.block_q_dkv or 0), max(both.block_kv, both.block_kv_dkv or 0)
    t, s = (min(n, 2 * most - 8) for n, most in zip((call.q_len, call.kv_len), blocks, strict=True))
    t = min(t, s) if mask == "blocks" else t  # block windows have no more queries than keys
    return {
        "topology": TOPOLOGIES[kind], "kind": kind, "kernel": "tpu_flash", "batch": 1, "q_len": t,
        "kv_len": s, "heads": 2, "head_dim": call.head_dim, "dtype": call.dtype, "role": call.role,
        "mask": mask, "training": training, "sizes": sizes.given(),
    }  # fmt: skip


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "mask"), list(zip(TOPOLOGIES, MASKS, strict=True)))
def test_tpu_flash_compiles_on_each_chip(compiler: Compiler, kind: str, mask: str, training: bool):
    found = compiler.compile(case(kind, FlashBlockSizes(), call(75_600), mask, training))
    assert found["message"] == ""


def drawn(seed: str, count: int) -> Iterator[dict[str, Any]]:
    """Draw requests of any size, length, head dim, dtype and mask; the chips take turns."""
    draw = random.Random(seed)
    for i in range(count):
        q_len = draw.choice(LENGTHS)
        kv_len = draw.choice((q_len, q_len, draw.choice(TEXTS)))
        dtype = draw.choice(("bfloat16", "bfloat16", "float32"))
        local = Call(1, q_len, kv_len, 2, 2, draw.choice(HEAD_DIMS), dtype)
        keys = (*FORWARD, *(DKV if draw.random() < TRAINING else ()))
        asked = FlashBlockSizes(**{key: draw.choice((None, draw.choice(PRESETS))) for key in keys})
        mask = draw.choice(MASKS if q_len == kv_len else MASKS[:4])
        training = draw.random() < TRAINING
        yield case(tuple(TOPOLOGIES)[i % len(TOPOLOGIES)], asked, local, mask, training)


@pytest.mark.slow
def test_drawn_requests_of_tpu_flash_compile(compiler):
    failed = []
    for one in drawn("fresh-2411", OWN_COUNT):
        found = compiler.compile(one)
        if not found["ok"]:
            failed.append((one, found["message"]))
    assert not failed


# ---- tpu_few_keys --------------------------------------------------------------------------------

TEXT_SHAPES = {  # keys, heads, head dim, dtype
    "SDXL": (77, 10, 64, "bfloat16"),
    "SD 1.5": (77, 8, 40, "bfloat16"),
    "Wan": (512, 4, 128, "bfloat16"),
    "PixArt": (120, 16, 72, "bfloat16"),
    "most keys": (1024, 4, 64, "bfloat16"),
    "float32": (512, 4, 128, "float32"),
    "float32 and most keys": (1000, 2, 256, "float32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", TOPOLOGIES)
@pytest.mark.parametrize("name", TEXT_SHAPES)
def test_tpu_few_keys_compiles(name: str, kind: str, training: bool, compiler: Compiler) -> None:
    kv_len, heads, head_dim, dtype = TEXT_SHAPES[name]
    case = {
        "kind": kind, "topology": TOPOLOGIES[kind], "kernel": "tpu_few_keys", "training": training,
        "role": "cross", "batch": 1, "q_len": 4096, "kv_len": kv_len, "heads": heads,
        "head_dim": head_dim, "dtype": dtype, "mask": "padding",
    }  # fmt: skip
    answer = compiler.compile(case)
    assert answer["ok"], answer["message"]
