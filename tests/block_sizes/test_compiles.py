"""The TPU's own compiler judges the adjuster: adjusted sizes compile, and what the rules forbid does not.

Without a TPU: libtpu compiles for a topology it is told of. Skipped where libtpu is not installed; MAXATTN_TPU_PYTHON
may name the python of another environment that has jax[tpu].
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from maxattn.block_sizes import BlockSizes, adjust
from maxattn.config import FlashBlockSizes
from maxattn.target import Target
from tests.block_sizes.asks import KEYS, call, uniform

CHILD = Path(__file__).with_name("tpu_child.py")
TOPOLOGIES = {"TPU v4": "v4:2x2x1", "TPU v5e": "v5e:2x2", "TPU v5p": "v5p:2x2x1", "TPU v6e": "v6e:2x2",
              "TPU v7x": "tpu7x:2x2x1"}  # fmt: skip
PYTHON = os.environ.get("MAXATTN_TPU_PYTHON") or (sys.executable if importlib.util.find_spec("libtpu") else None)
pytestmark = pytest.mark.skipif(PYTHON is None, reason='libtpu is not installed (pip install "maxattn[tpu]")')


def case(kind: str, sizes: BlockSizes, training: bool, head_dim: int = 128, dtype: str = "bfloat16") -> dict[str, Any]:
    """Describe one compile for the child."""
    return {"topology": TOPOLOGIES[kind], "sizes": sizes.given(), "training": training, "head_dim": head_dim,
            "dtype": dtype}  # fmt: skip


def compiled(cases: Iterable[dict[str, Any]], seconds: int = 300) -> list[dict[str, Any]]:
    """Compile the cases in a child process, which is killed when it takes too long."""
    lines = "\n".join(map(json.dumps, cases))
    assert PYTHON is not None
    child = subprocess.run([PYTHON, str(CHILD)], input=lines, capture_output=True, text=True, timeout=seconds)
    assert child.returncode == 0, child.stderr[-2000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


def adjusted(asked: FlashBlockSizes, kind: str, training: bool, head_dim: int = 128, dtype: str = "bfloat16") -> dict:
    """Adjust a request for long self-attention, and describe its compile."""
    sizes, _ = adjust(asked, call(75600, None, head_dim, dtype), "flash", Target.named(kind), training)
    return case(kind, sizes, training, head_dim, dtype)


def test_a_few_adjusted_sizes_compile():
    cases = [
        adjusted(FlashBlockSizes(block_q=3024, block_kv=512), "TPU v6e", training=False),
        adjusted(FlashBlockSizes(block_q=1000, block_kv=300), "TPU v5p", training=True),
        adjusted(uniform(256), "TPU v5p", training=True),
    ]
    results = compiled(cases)
    assert [r["message"] for r in results] == ["", "", ""]


def test_what_the_rules_forbid_does_not_compile():
    training = BlockSizes(3024, 512, 512, 3024, 512, 512, use_fused_bwd_kernel=True)
    lanes, odd, vmem = BlockSizes(512, 192, 192), BlockSizes(1001, 512, 512), BlockSizes(2048, 2048, 2048)
    cases = [case("TPU v6e", BlockSizes(3024, 512, 512), False), case("TPU v6e", training, True)]
    results = compiled([*cases, *(case("TPU v5p", sizes, False) for sizes in (lanes, odd, vmem))])
    assert [r["ok"] for r in results] == [True, False, False, False, False]
    assert "block_q must be a multiple of 128" in results[1]["message"]
    assert "must be a multiple of 128" in results[2]["message"]
    assert "divisible by 8 and 128" in results[3]["message"]
    assert "vmem" in results[4]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_random_requests_compile_once_adjusted(kind):
    """Ask for anything, forward and training, every head dim, bfloat16 and float32: all of it compiles."""
    draw = random.Random(kind)
    cases = [_random(draw, kind) for _ in range(12)]
    # Requests that the adjuster sends to one answer are one compile.
    distinct = list({json.dumps(c, sort_keys=True): c for c in cases}.values())
    failed = [(c, r) for c, r in zip(distinct, compiled(distinct, 1800), strict=True) if not r["ok"]]
    assert not failed


def _random(draw: random.Random, kind: str) -> dict[str, Any]:
    asked: dict[str, Any] = {key: draw.choice((None, 128, 512, 1000, 1024, 2048, 3024, 4096)) for key in KEYS}
    asked["use_fused_bwd_kernel"] = draw.random() < 0.5
    return adjusted(
        FlashBlockSizes(**asked), kind, draw.random() < 0.7, draw.choice((64, 128, 256)),
        draw.choice(("bfloat16", "bfloat16", "float32")),
    )  # fmt: skip
