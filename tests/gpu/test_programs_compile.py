"""XLA's program for an absent H200 copies no weights, keys or values.

Needs jax's CUDA plugin, and no GPU; MAXATTN_CUDA_PYTHON may name the python of another environment
that has it. Compiling is not a measurement: nothing runs on the GPU, and no matmul is timed.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HAS_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
PYTHON = os.environ.get("MAXATTN_CUDA_PYTHON") or (sys.executable if HAS_PLUGIN else None)
WIDTH, INNER, TOKENS, LAYERS, PASSES = 256, 1024, 1536, 3, 2
OF_LAYER = [1, 1, 4608, 2, 128]  # keys, or values, of one layer of the cache
EACH = 5  # passes over the tokens of a layer: three norms with what is before them, two sums

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="jax's CUDA plugin is not installed"),
]
Written = list[dict[str, Any]]


def printed(child: str, *words: str) -> Any:
    """Run a module of tests.gpu in the environment with jax's CUDA plugin; return its JSON."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    env |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = ["nice", str(PYTHON), "-W", "ignore", "-m", f"tests.gpu.{child}", *words]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


@cache
def written(layers: str) -> Written:
    """List the arrays that a block's program writes; "scan" has scanned layers, default options."""
    return printed("programs_child", layers)


def moved(found: Written) -> list[list[int]]:
    """Return the shapes of arrays that are only moved, and are at least as large as a matrix."""
    kinds = ("slice", "concatenate", "copy")
    large = [x for x in found if math.prod(x["shape"]) >= WIDTH**2 and x["dtype"] == "bf16"]
    named = [x for x in large if any(k in x["name"] for k in kinds) and "update" not in x["name"]]
    return [x["shape"] for x in [*named, *(x for x in large if x["operation"] == "fusion-done")]]


def passes(found: Written, width: int, dtype: str = "bf16") -> int:
    """Count the fusions that write `channels` numbers for every token."""
    shapes = [TOKENS, width], [1, TOKENS, width]
    kind = [x for x in found if x["operation"] == "fusion" and "gemm" not in x["name"]]
    return sum(x["shape"] in shapes and x["dtype"] == dtype for x in kind)


def test_layers_of_their_own_are_read_where_they_lie() -> None:
    assert moved(written("apart")) == []


def test_scanned_layers_are_copied() -> None:
    shapes = moved(written("scan"))
    assert OF_LAYER in shapes and [1, WIDTH, WIDTH] in shapes and [1, WIDTH, INNER] in shapes


def test_modulation_is_a_part_of_norms_and_sums() -> None:
    found = written("apart")
    assert 0 < passes(found, WIDTH) <= EACH * LAYERS * PASSES
    assert passes(found, WIDTH, "f32") == 0, "no norm leaves float32 to another pass"


def test_gelu_is_a_part_of_its_product() -> None:
    assert passes(written("apart"), INNER) == 0 < passes(written("scan"), INNER)
