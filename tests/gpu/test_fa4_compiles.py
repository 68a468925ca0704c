"""FlashAttention-4's own compiler accepts maxattn's calls, also for GPUs that are not here.

The compiler needs fa4-jax and no GPU. MAXATTN_FA4_PYTHON may name the python of another environment
that has it; `make test-fa4-compile` runs all of it. Compiling is not a measurement: nothing runs on
these GPUs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("MAXATTN_FA4_PYTHON") or (
    sys.executable if importlib.util.find_spec("fa4_jax") else None
)
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
TAKES_256 = {"sm_80", "sm_90a", "sm_120a"}

pytestmark = pytest.mark.skipif(PYTHON is None, reason="fa4-jax is not installed")


def compiled(architecture: str, *cases: str) -> list[dict[str, Any]]:
    """Return the results of a child process by case."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "CUTE_DSL_ARCH": architecture}
    env |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    words = ["nice", str(PYTHON), "-W", "ignore", "-m", "tests.gpu.fa4_child", *cases]
    ran = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def named_cases() -> list[str]:
    """Return the names of all cases from the source, since importing them needs fa4-jax."""
    source = (ROOT / "tests/gpu/fa4_child.py").read_text(encoding="utf-8")
    return re.findall(r'^    "([^"]+)": CompileCase\(', source, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_passes_compile(architecture: str) -> None:
    answers = compiled(architecture)
    assert [answer["case"] for answer in answers] == named_cases()
    refused = {answer["case"] for answer in answers if "refused" in answer}
    dims = {name: re.search(r"head dim (\d+)", name) for name in named_cases()}
    long = {name for name, found in dims.items() if found and int(found[1]) > 128}
    biased = {"bias", "bias, causal", "bias of keys"}
    on_hopper = architecture == "sm_90a"
    expected = set() if architecture in TAKES_256 else long
    assert refused == expected | (set() if on_hopper else biased)
    assert not [answer for answer in answers if answer.get("message")]


@pytest.mark.slow
def test_the_compiler_says_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels need instructions that this target does not have."""
    (answer,) = compiled("sm_100", "full")
    assert answer["message"]
