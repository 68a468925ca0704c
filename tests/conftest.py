"""Eight CPU devices for every test, set before jax starts its backend."""

from __future__ import annotations

import gc
import os
import re
from itertools import count

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = ["--xla_force_host_platform_device_count=8"]
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Most of a test's time is compiling small programs: without LLVM's optimizations that takes a
    # third less, and without XLA's newer generator of fused loops (jax 0.10.2; 0.12 has no other,
    # and ignores this) again a third.
    _FLAGS.append("--xla_backend_optimization_level=0")
    _FLAGS.append("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
    # One program is too small to be cut into 32.
    _FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")
for _flag in _FLAGS:
    if _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
# The float64 reference: threads of numpy's would wait for each other beside another test's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Sizes that were tuned on this machine would change the plans.
os.environ["MAXATTN_CACHE"] = os.devnull

import jax  # noqa: E402 -- jax reads the platforms when it is imported
from jax._src.interpreters import mlir  # noqa: E402

# jax makes an MLIR context for each program: 3 ms, and a megabyte that stays. One serves all; a
# jax whose private function has another name makes its own.
if hasattr(mlir, "make_ir_context"):
    _context = mlir.make_ir_context()
    mlir.make_ir_context = lambda: _context

# Python's garbage collector, as often as it comes, takes a tenth of the time of tracing.
gc.set_threshold(100_000, 20, 100)


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that the garbage collector does not visit them again."""
    gc.collect()
    gc.freeze()


# jax keeps calls of 8,192 jitted functions while they live, and none of a later one: a test that
# counts its programs would find none.
_TESTS_A_CACHE = 2000
_ended = count(1)


def pytest_runtest_logfinish() -> None:
    """Empty jax's caches after every `_TESTS_A_CACHE` tests of a process."""
    if next(_ended) % _TESTS_A_CACHE == 0:
        jax.clear_caches()


# They wait for processes of their own; at the end of a run one core would idle beside them.
_FIRST = ("test_two_processes_learn_what_one_learns", "test_every_resume_is_exact")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first."""
    items.sort(key=lambda item: item.name not in _FIRST)


_MATRICES = {
    "test_matrix.py": "kernels against float64",
    "context_parallel/test_meshes.py": "kernels on meshes against float64",
    "test_kernels_on_meshes.py": "all kernels inside all context strategies",
    "test_zigzag.py": "masks on zig-zag rings against float64",
}


def pytest_terminal_summary(terminalreporter) -> None:
    """Print how many cases of each matrix ran."""
    passed = terminalreporter.stats.get("passed", [])
    for file, what in _MATRICES.items():
        count = sum(
            bool(re.search(rf"{file}::test_\w*(pairs|product|against)\w*\[", r.nodeid))
            for r in passed
        )
        if count:
            terminalreporter.write_line(f"matrix: {count} cases of {what}")
