"""Eight CPU devices for every test, set before jax starts its backend."""

from __future__ import annotations

import gc
import os
import re
from itertools import count
from typing import Any

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = ["--xla_force_host_platform_device_count=8"]
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Most of a test's time is compiling small programs: without LLVM's optimizations that takes a
    # third less, and without XLA's newer generator of fused loops (jax 0.10.2; 0.12 has no other,
    # and ignores this) again a third.
    _FLAGS.append("--xla_backend_optimization_level=0")
    _FLAGS.append("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
    _FLAGS.append(
        "--xla_cpu_parallel_codegen_split_count=1"
    )  # one program is too small to be cut into 32
for _flag in _FLAGS:
    if _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
# The float64 reference: threads of numpy's would wait for each other beside another test's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["MAXATTN_CACHE"] = (
    os.devnull
)  # sizes that were tuned on this machine would change the plans


import jax  # noqa: E402 -- jax reads the platforms when it is imported
from jax._src import core  # noqa: E402 -- the same
from jax._src.interpreters import mlir  # noqa: E402 -- the same

from tests import draws  # noqa: E402 -- the same

draws.share()


@property
def _no_sharding(self: core.Tracer) -> None:
    """Say that a traced value has no sharding, as jax 0.12 does.

    Flax asks with `getattr` for it whenever a random stream moves on. jax 0.10 goes through the
    whole trace each time, for a message that nobody reads: most of the time of building a model.
    """
    raise AttributeError(f"The 'sharding' attribute is not available on {self._error_repr()}.")


core.Tracer.sharding = _no_sharding  # type: ignore[misc]

# One context of MLIR serves as many programs as this. To make one takes longer than to lower a
# small program in it; what is in one stays in memory to its end.
_PROGRAMS_A_CONTEXT = 64
_make_context = mlir.make_ir_context
_context: list[Any] = [None, 0]


def _shared_context() -> Any:
    """Return the context of the programs before, a new one after every `_PROGRAMS_A_CONTEXT`."""
    if _context[0] is None or _context[1] == _PROGRAMS_A_CONTEXT:
        _context[:] = [_make_context(), 0]
    _context[1] += 1
    return _context[0]


mlir.make_ir_context = _shared_context

# Python's garbage collector, as often as it comes, takes a tenth of the time of tracing.
gc.set_threshold(100_000, 20, 100)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what the imports made: it stays to the end."""
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
_FIRST = (
    "test_two_processes_learn_what_one_learns",
    "test_a_killed_run_ends_with_the_same_bits",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests."""
    items.sort(key=lambda item: item.name not in _FIRST)


_MATRICES = {
    "test_matrix.py": "kernels against float64",
    "context_parallel/test_meshes.py": "kernels on meshes against float64",
    "test_kernels_on_meshes.py": "all kernels inside all context strategies",
    "test_zigzag.py": "masks on zig-zag rings against float64",
}


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how many cases of each matrix ran."""
    passed = terminalreporter.stats.get("passed", [])
    for file, what in _MATRICES.items():
        count = sum(
            bool(re.search(rf"{file}::test_\w*(pairs|product|against)\w*\[", r.nodeid))
            for r in passed
        )
        if count:
            terminalreporter.write_line(f"matrix: {count} cases of {what}")
