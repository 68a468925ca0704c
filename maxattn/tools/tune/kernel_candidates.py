"""Which kernels are worth timing for a call, and why the others are not."""

from __future__ import annotations

import os
from typing import NamedTuple

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.kernels import KERNELS, Kernel, build, refusal, scores_of
from maxattn.kernels.auto.tuned_order import PLAIN
from maxattn.kernels.flash import has_fa4
from maxattn.target import Target

MOST_OPERATIONS = 2e12  # of plain JAX beside other kernels: it would take minutes
SHARE = 0.25  # of the memory that dense scores may take: they are there several times


class KernelCandidates(NamedTuple):
    """Hold the kernels to time, built for a call, and why each other one is not timed."""

    built: dict[str, Kernel]
    left_out: dict[str, str]


def kernel_candidates(call: Call, config: AttentionConfig, target: Target) -> KernelCandidates:
    """Return the kernels that can run a call, by name.

    `deterministic` refuses none here: a plan that wants it looks at what was measured itself.

    Args:
        call: of one device.
        config: whose settings the kernels are built with.
        target: where they would run.
    """
    reasons = {name: refusal(name, call, target) for name in KERNELS}
    runs = [name for name, reason in reasons.items() if reason is None]
    # Of kernels for other devices there is nothing to say here.
    left_out = {n: r.rule for n, r in reasons.items() if r and r.feature != "platform"}
    built = {name: build(name, call, config, target) for name in runs}
    for name in runs:
        others = [each for each in built if each != name]
        if why := _not_worth_it(name, built[name], call, target, others):
            left_out[name] = why
            del built[name]
    return KernelCandidates(built, left_out)


def _not_worth_it(name: str, kernel: Kernel, call: Call, target: Target, others: list[str]) -> str:
    """Say why a kernel that can run is not timed; "" where it is."""
    if name == "flash" and target.platform == "gpu" and not has_fa4(target):
        return "it runs cuDNN here, which is timed as cudnn"
    if target.platform == "cpu" and kernel.is_pallas:
        return "a CPU interprets it, step by step"
    scores = 4.0 * scores_of(call)
    most = SHARE * _memory(target)
    if name == "dot_product" and scores > most:
        return f"its scores take {scores / 2**30:.1f} GiB, of {most / 2**30:.1f} GiB that they may"
    work = scores * call.head_dim
    if name in PLAIN and work > MOST_OPERATIONS and set(others) - set(PLAIN):
        return "plain JAX takes too long for so many pairs"
    return ""


def _memory(target: Target) -> float:
    """Return the bytes of a device's memory; a machine's own where the device has none."""
    if target.device.memory:
        return float(target.device.memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
