"""Time a function of torch as examples/measuring/clock.py times a step: waiting once a round."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

from tests.beside.command import wait_for

KINDS = {
    "attention": re.compile(r"flash|fmha|sdpa|attention"),
    "matmul": re.compile(r"gemm|cublas|nvjet|xmma|cutlass|mm_|addmm|conv_|convolution"),
}
ALL = (*KINDS, "rest")


def measure(run: Callable[[], Any], said: Any) -> dict[str, Any]:
    """Warm up, wait where that was asked for, and time rounds.

    Args:
        run: one step.
        said: the command line, with `rounds`, `steps`, `profile`, `start_when` and `device`.
    """
    began = perf_counter()
    for _ in range(2):
        run()
    synchronize(said.device)
    warm = perf_counter() - began
    wait_for(said.start_when)
    times = [_round(run, said) for _ in range(said.rounds + 1)][1:]
    return {
        "ms": median(times),
        "rounds_ms": times,
        "warm_s": round(warm, 1),
        "peak_bytes": peak_bytes(said.device),
        "device": device_name(said.device),
        "breakdown_ms": breakdown(run, said) if said.profile else dict.fromkeys(ALL, 0.0),
    }


def _round(run: Callable[[], Any], said: Any) -> float:
    began = perf_counter()
    for _ in range(said.steps):
        run()
    synchronize(said.device)
    return 1e3 * (perf_counter() - began) / said.steps


def breakdown(run: Callable[[], Any], said: Any) -> dict[str, float]:
    """Profile a round: milliseconds of a step in attention, matrix products and the rest."""
    import torch

    gpu, cuda = said.device != "cpu", torch.autograd.DeviceType.CUDA
    with torch.profiler.profile() as seen:
        _round(run, said)
    found = dict.fromkeys(ALL, 0.0)
    for event in seen.key_averages():
        if gpu and (event.device_type != cuda or event.is_user_annotation):
            continue
        spent = event.self_device_time_total if gpu else event.self_cpu_time_total
        found[kind_of(event.key)] += spent / 1e3 / said.steps
    return found


def kind_of(name: str) -> str:
    """Sort a kernel by its name."""
    return next((kind for kind, words in KINDS.items() if words.search(name.lower())), "rest")


# ---- the device ----------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    """Wait until the device has done all."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def forget_peak(device: str) -> None:
    """Count the peak of memory from here on, without what building a model took."""
    import torch

    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int:
    """Return the most bytes that tensors took; 0 where nobody counts."""
    import torch

    return 0 if device == "cpu" else torch.cuda.max_memory_allocated()


def device_name(device: str) -> str:
    """Name the device."""
    import torch

    return "cpu" if device == "cpu" else torch.cuda.get_device_name()
