"""What the arithmetic of context parallelism needs to know of a machine: figures as data, with
where they are from.

All are of one device as jax lists it: of a TPU v7x that is half a chip. Most are published and were
not measured by us; each says so, and a plan that used them repeats it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from maxattn.target import HBM, PEAK, Target, known_kind

Link = Literal["torus", "switch"]


class Machine(NamedTuple):
    """Hold what one device computes, holds and receives in a second.

    Args:
        flops: FLOP/s that an attention kernel reaches in bfloat16, forward and backward together.
        memory: bytes of HBM that a program may use.
        hbm: bytes/s of HBM that merges and sums reach.
        link: "torus" (each device has two neighbours along an axis) or "switch" (all reach all at
            full rate).
        neighbour: bytes/s that a device receives from one other: a hop of a ring.
        gather: bytes/s received in an all-gather.
        exchange: bytes/s received in an all-to-all, on a switch; on a torus it follows from
            `neighbour`.
        source: where the figures are from.
        slowed: share of a kernel's rate that a transfer beside it takes.
    """

    flops: float
    memory: float
    hbm: float
    link: Link
    neighbour: float
    gather: float
    exchange: float
    source: str
    slowed: float = 0.0

    def exchanged(self, n: int) -> float:
        """Return bytes/s received in an all-to-all of n devices.

        On a ring of n with both directions in use, n L bytes take n L / (8 w): of the (n - 1) L / n
        that a device receives, most pass through others on the way.
        """
        return self.exchange if self.link == "switch" else 8 * self.neighbour * (n - 1) / n**2


START = 1e-5
"""Seconds from the start of a transfer, or of a kernel, to its first byte or product: a rule, not
measured by us.
"""

_TPU = "published per-chip figures, not measured by us; 60% of the peak FLOP/s assumed"
_GPU = "published figures, not measured by us; 60% of the peak FLOP/s and 75% of the link assumed"
# NCCL's kernels take multiprocessors from the kernel beside them. A ring of four over
# FlashAttention-4, 14B 480p, that two H200s played: a step of 34.1 ms, without its transfers 32.1;
# they are nine hops of 0.79 ms. (Queued by a script,
# docs/measured/h200x2-ring-profiles-2026-11-22.txt; `bench --played-by` has half of it at 480p,
# twice of it at 720p.)
_NCCL = (34.1 - 32.1) / (9 * 0.79)


def _tpu(kind: str, hbm: float, neighbour: float, source: str = _TPU) -> Machine:
    return Machine(0.6 * PEAK[kind], HBM[kind], hbm, "torus", neighbour, 2 * neighbour, 0.0, source)


def _gpu(kind: str, hbm: float, one_way: float) -> Machine:
    rate = 0.75 * one_way
    return Machine(0.6 * PEAK[kind], HBM[kind], hbm, "switch", rate, rate, rate, _GPU, _NCCL)


# neighbour: one direction of one inter-chip link (TPU); one direction of all NVLinks of a GPU.
MACHINES: dict[str, Machine] = {
    "TPU v4": _tpu("TPU v4", 1.2e12, 45e9),
    "TPU v5e": _tpu("TPU v5e", 0.82e12, 45e9),
    "TPU v5p": _tpu("TPU v5p", 2.77e12, 90e9),
    "TPU v6e": _tpu("TPU v6e", 1.64e12, 90e9),
    # Half of a chip's 7.4e12; the link is the chip's, and a ring through both halves of each chip
    # crosses it once.
    "TPU v7x": _tpu("TPU v7x", 3.7e12, 90e9, f"half of {_TPU}"),
    "NVIDIA A100": _gpu("NVIDIA A100", 2.0e12, 300e9),
    "NVIDIA H100": _gpu("NVIDIA H100", 3.35e12, 450e9),
    "NVIDIA B200": _gpu("NVIDIA B200", 8.0e12, 900e9),
    # gather, exchange: four H200s over cuDNN, 32,768 tokens of 40 heads of 128, forward: 36.3 ms on
    # one; 10.41 ms with K and V gathered (503 MB received) and 10.01 with Ulysses (252 MB), where a
    # quarter of the one would be 9.08. The rest: four over FlashAttention-4, 14B 480p
    # (docs/benchmarks.md). flops: what training steps with all-gather and Ulysses leave for the
    # kernel, less those transfers. neighbour: nine hops of 168 MB in 7.1 ms, beside kernels. hbm:
    # 3.7 GB of packing and sums in 1.2 ms.
    "NVIDIA H200": Machine(
        6.2e14,
        HBM["NVIDIA H200"],
        3.1e12,
        "switch",
        212e9,
        380e9,
        270e9,
        "measured on 4 H200s",
        _NCCL,
    ),
    "cpu": Machine(
        5e10, 8e9, 1e10, "switch", 5e9, 5e9, 5e9, "a rule: emulated devices share one memory"
    ),
}
_LIKE = {"cpu": "cpu", "gpu": "NVIDIA H100", "tpu": "TPU v5p"}


def machine_of(target: Target) -> Machine:
    """Return the figures of a target, those of the usual machine of its platform for a kind that is
    not known.
    """
    return MACHINES[known_kind(target.device_kind) or _LIKE[target.platform]]
