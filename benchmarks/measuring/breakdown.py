"""Where the time of a step goes: the device's kernels as attention, matrix products and the rest.

The record is that of `jax.profiler`; the program's text says what a kernel was compiled from. All
that runs inside `maxattn.attention` is attention, its matrix products too.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .profile import Event

ATTENTION, MATMUL, REST = KINDS = ("attention", "matmul", "rest")
INSIDE = re.compile(r"_run\b")  # maxattn's own jit around every attention
# Names of kernels that the program does not name.
KERNEL = re.compile(r"flash|fmha|splash|maxattnkernels")
OP_NAME = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', re.MULTILINE)
OURS = re.compile(r"maxattnmodules")  # norm and rotary embedding
PRODUCT = re.compile(r"gemm|cublas|nvjet|xmma|cutlass|conv(?!ert)|dot|matmul|ynn")  # ynn: a CPU's


@dataclass(frozen=True)
class Kernel:
    """One kernel's share of a step.

    Args:
        name: of the kernel.
        kind: "attention", "matmul" or "rest".
        ms: a step.
        calls: a step.
    """

    name: str
    kind: str
    ms: float
    calls: float


def breakdown(events: Iterable[Event], steps: int, program: str = "") -> tuple[Kernel, ...]:
    """Add a profile up: every kernel with its time, the longest first.

    Args:
        events: from `profile.events_of`.
        steps: that the profile covers.
        program: text of the compiled program.
    """
    origins = dict(OP_NAME.findall(program))
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    for event in events:
        key = (_bare(event.name), kind_of(event.name, origins.get(event.op, "")))
        seconds[key] += (event.end - event.start) / 1e9
        calls[key] += 1
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    return tuple(Kernel(*key, 1e3 * time / steps, calls[key] / steps) for key, time in longest)


def kind_of(name: str, origin: str = "") -> str:
    """Sort a kernel by where its operation comes from, and by its name.

    Args:
        name: of the kernel.
        origin: of its operation, as the program says it.
    """
    if INSIDE.search(origin) or KERNEL.search(name):
        return ATTENTION
    return MATMUL if PRODUCT.search(name) and not OURS.search(name) else REST


def by_kind(kernels: tuple[Kernel, ...]) -> dict[str, float]:
    """Add the milliseconds of each kind up."""
    return {kind: sum(k.ms for k in kernels if k.kind == kind) for kind in KINDS}


def _bare(name: str) -> str:
    """Return a kernel's name without the number of its copy."""
    return re.sub(r"[._]\d+$", "", name)
