"""Time a compiled step without the host's share, and sort its kernels: attention, matmul, rest.

A profile names the kernels that the device ran; the text of the program names the operation of
each. Every operation inside `maxattn.attention` counts as attention, matrix products too.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import jax

from maxattn.measuring.timing import DEVICE, KERNELS

from .steps import Step

KINDS = ATTENTION, MATMUL, REST = "attention", "matmul", "rest"
INSIDE = re.compile(r"_run\b")  # maxattn's own jit around every attention
# Names of kernels whose operation the program does not name.
ATTENTION_KERNEL = re.compile(r"flash|fmha|splash|maxattnkernels")
OP_NAME = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', re.MULTILINE)
OURS = re.compile(r"maxattnmodules")  # norm and rotary embedding
PRODUCT = re.compile(r"gemm|cublas|nvjet|xmma|cutlass|conv(?!ert)|dot|matmul|ynn")  # ynn: a CPU's


class Kernel(NamedTuple):
    """The time of one kernel in a step: milliseconds and number of calls."""

    name: str
    kind: str
    ms: float
    calls: float


class Times(NamedTuple):
    """The measured times of a step.

    Args:
        ms: milliseconds of a step in each round.
        peak: most bytes of the device's memory in use; 0 if the device does not report them.
        kernels: kernels of a step, the longest first; () without a profile.
        idle: milliseconds of a step in which the device ran no kernel.
    """

    ms: tuple[float, ...]
    peak: int
    kernels: tuple[Kernel, ...] = ()
    idle: float = 0.0

    @property
    def median(self) -> float:
        """Median milliseconds of a step."""
        return median(self.ms)

    def by_kind(self) -> dict[str, float]:
        """Return the milliseconds of each kind of kernel."""
        return {kind: sum(k.ms for k in self.kernels if k.kind == kind) for kind in KINDS}


def measure(step: Step, rounds: int, steps: int, profile: str | Path | None = None) -> Times:
    """Run a compiled step repeatedly; the host waits only at the end of each round.

    Args:
        step: the step to time.
        rounds: number of timed rounds, after one round of warm-up.
        steps: number of steps in a round.
        profile: folder for the profile of one more round.
    """
    carry, fixed = step.start()

    def run_round() -> float:
        nonlocal carry
        began = perf_counter()
        for _ in range(steps):
            carry = step.run(carry, fixed)
        jax.block_until_ready(carry)
        return 1e3 * (perf_counter() - began) / steps

    carry = jax.block_until_ready(step.run(carry, fixed))
    times = tuple(run_round() for _ in range(rounds + 1))[1:]
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    if profile is None:
        return Times(times, peak)
    with jax.profiler.trace(str(profile)):
        run_round()
    events = list(events_of(profile))
    kernels = kernels_of(events, steps, step.compiled.as_text())
    return Times(times, peak, kernels, idle_ns(events) / 1e6 / steps)


# ---- the profile ---------------------------------------------------------------------------------


class Event(NamedTuple):
    """One call of a kernel: its operation in the program, and its start and end in ns."""

    name: str
    op: str
    start: float
    end: float


def events_of(folder: str | Path) -> Iterator[Event]:
    """Yield the kernels of the first device from the newest profile; on a CPU, XLA's operations."""
    newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    record: Any = jax.profiler.ProfileData.from_file(str(newest))
    planes = {plane.name: plane for plane in record.planes}
    device = next((plane for name, plane in sorted(planes.items()) if DEVICE.match(name)), None)
    lines = [line for plane in ([device] if device else planes.values()) for line in plane.lines]
    kept = [line for line in lines if device is None or line.name.startswith(KERNELS)]
    for event in (event for line in kept for event in line.events):
        op = dict(event.stats).get("hlo_op")
        if device or op:  # a CPU's lines have Python's calls too
            end = event.start_ns + event.duration_ns
            yield Event(event.name, str(op or event.name), event.start_ns, end)


def kernels_of(events: Iterable[Event], steps: int, program: str = "") -> tuple[Kernel, ...]:
    """Sum up a profile of `steps` steps; `program` is the text of the compiled program."""
    origins = dict(OP_NAME.findall(program))
    ns: dict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    for event in events:
        without_number = re.sub(r"[._]\d+$", "", event.name)
        key = without_number, kind_of(event.name, origins.get(event.op, ""))
        ns[key] += event.end - event.start
        calls[key] += 1
    longest = sorted(ns.items(), key=lambda item: -item[1])
    return tuple(Kernel(*key, time / 1e6 / steps, calls[key] / steps) for key, time in longest)


def kind_of(name: str, origin: str = "") -> str:
    """Return the kind of a kernel from its name, and from its operation's `op_name`."""
    if INSIDE.search(origin) or ATTENTION_KERNEL.search(name):
        return ATTENTION
    return MATMUL if PRODUCT.search(name) and not OURS.search(name) else REST


def idle_ns(events: Iterable[Event]) -> float:
    """Return how long the device ran nothing between its first kernel and its last."""
    idle, done = 0.0, None
    for event in sorted(events, key=lambda e: e.start):
        idle += 0.0 if done is None else max(0.0, event.start - done)
        done = event.end if done is None else max(done, event.end)
    return idle
