"""The tiles of `tpu_flash` compile on every chip, with every mask; `make test-tpu-compile`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from maxattn.block_sizes import DKV, FORWARD, BlockSizes
from maxattn.block_sizes.transposed import sizes_of
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.target import Target
from tests.block_sizes.compiler import PYTHON, TOPOLOGIES, Compiler
from tests.block_sizes.random_requests import HEAD_DIMS, LENGTHS, PRESETS, TEXTS

pytestmark = pytest.mark.skipif(
    PYTHON is None, reason='libtpu is not installed (pip install "maxattn[tpu]")'
)
MASKS = ("full", "padding", "window", "both", "blocks")
COUNT, TRAINING = 300, 0.4


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    """One child for the whole file."""
    with Compiler() as started:
        yield started


def case(
    kind: str, asked: FlashBlockSizes, call: Call, mask: str, training: bool
) -> dict[str, Any]:
    """Describe the compile of the tiles that a request becomes: two blocks of each, ragged."""
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


def call(length: int, h: int, dtype: str = "bfloat16") -> Call:
    return Call(1, length, length, 2, 2, h, dtype)


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "mask"), list(zip(TOPOLOGIES, MASKS, strict=True)))
def test_each_chip_compiles(compiler: Compiler, kind: str, mask: str, training: bool) -> None:
    found = compiler.compile(case(kind, FlashBlockSizes(), call(75_600, 128), mask, training))
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
def test_drawn_requests_compile(compiler: Compiler) -> None:
    failed = []
    for one in drawn("fresh-2411", COUNT):
        found = compiler.compile(one)
        if not found["ok"]:
            failed.append((one, found["message"]))
    assert not failed
