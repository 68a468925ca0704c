"""Time a compiled step without the host's share, and read what memory it took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import jax

from .breakdown import Kernel, breakdown
from .steps import Step


@dataclass(frozen=True)
class Times:
    """Hold what was measured.

    Args:
        ms: a step, one number a round.
        peak: bytes of the device's memory in use at most, or 0 where the device does not say.
        kernels: of a step, by the profiler, where one was asked for.
    """

    ms: tuple[float, ...]
    peak: int
    kernels: tuple[Kernel, ...] = ()

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
    carry = jax.block_until_ready(step.run(carry, fixed))
    times = []
    for _ in range(rounds + 1):
        began = perf_counter()
        for _ in range(steps):
            carry = step.run(carry, fixed)
        jax.block_until_ready(carry)
        times.append(1e3 * (perf_counter() - began) / steps)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    if profile is None:
        return Times(tuple(times[1:]), peak)
    with jax.profiler.trace(str(profile)):
        for _ in range(steps):
            carry = step.run(carry, fixed)
        jax.block_until_ready(carry)
    return Times(tuple(times[1:]), peak, breakdown(profile, steps, step.compiled.as_text()))
