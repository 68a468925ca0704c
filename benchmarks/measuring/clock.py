"""Time a compiled step without the host's share, and read what memory it took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import jax

from .breakdown import Kernel, breakdown
from .profile import events_of, idle_ns
from .steps import Step


@dataclass(frozen=True)
class Times:
    """The measured times.

    Args:
        ms: a step, one number a round.
        peak: bytes of the device's memory in use at most, or 0 where the device does not say.
        kernels: of a step, by the profiler, where one was asked for.
        idle: milliseconds of a step in which the device ran none of them.
    """

    ms: tuple[float, ...]
    peak: int
    kernels: tuple[Kernel, ...] = ()
    idle: float = 0.0

    @property
    def median(self) -> float:
        """Milliseconds of a step."""
        return median(self.ms)


def measure(step: Step, rounds: int, steps: int, profile: str | Path | None = None) -> Times:
    """Run a step again and again, and wait only once a round.

    Args:
        step: compiled.
        rounds: how many are timed, after one round that warms up.
        steps: in a round.
        profile: a folder to record one more round in.
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
    found = breakdown(events, steps, step.compiled.as_text())
    return Times(times, peak, found, idle_ns(events) / 1e6 / steps)
