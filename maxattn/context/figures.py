"""What the arithmetic of context parallelism needs to know of a machine: figures as data, with where they are from.

Most are published and were not measured by us; each says so, and a plan that used them repeats it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from maxattn.target import HBM, Target

Link = Literal["torus", "switch"]


class Machine(NamedTuple):
    """Hold what one device computes, holds and receives in a second.

    Args:
        flops: FLOP/s that an attention kernel reaches in bfloat16.
        memory: bytes of HBM that a program may use.
        hbm: bytes/s of HBM.
        link: "torus" (each device has two neighbours along an axis) or "switch" (all reach all at full rate).
        neighbour: bytes/s that a device receives from one other: a hop of a ring.
        gather: bytes/s received in an all-gather.
        exchange: bytes/s received in an all-to-all, on a switch; on a torus it follows from `neighbour`.
        source: where the figures are from.
    """

    flops: float
    memory: float
    hbm: float
    link: Link
    neighbour: float
    gather: float
    exchange: float
    source: str

    def exchanged(self, n: int) -> float:
        """Return bytes/s received in an all-to-all of n devices.

        On a ring of n with both directions in use, n L bytes take n L / (8 w): of the (n - 1) L / n that a device
        receives, most pass through others on the way.
        """
        return self.exchange if self.link == "switch" else 8 * self.neighbour * (n - 1) / n**2


START = 1e-5
"""Seconds from the start of a transfer, or of a kernel, to its first byte or product: a rule, not measured by us."""

_TPU = "published per-chip figures, not measured by us; 60% of the peak FLOP/s assumed"
_GPU = "published figures, not measured by us; 60% of the peak FLOP/s and 75% of the link assumed"


def _tpu(kind: str, peak: float, hbm: float, neighbour: float) -> Machine:
    return Machine(0.6 * peak, HBM[kind], hbm, "torus", neighbour, 2 * neighbour, 0.0, _TPU)


def _gpu(kind: str, peak: float, hbm: float, one_way: float) -> Machine:
    rate = 0.75 * one_way
    return Machine(0.6 * peak, HBM[kind], hbm, "switch", rate, rate, rate, _GPU)


# neighbour: one direction of one inter-chip link (TPU); one direction of all NVLinks of a GPU.
MACHINES: dict[str, Machine] = {
    "TPU v4": _tpu("TPU v4", 275e12, 1.2e12, 45e9),
    "TPU v5e": _tpu("TPU v5e", 197e12, 0.82e12, 45e9),
    "TPU v5p": _tpu("TPU v5p", 459e12, 2.77e12, 90e9),
    "TPU v6e": _tpu("TPU v6e", 918e12, 1.64e12, 90e9),
    "TPU v7x": _tpu("TPU v7x", 2307e12, 7.4e12, 90e9),
    "NVIDIA A100": _gpu("NVIDIA A100", 312e12, 2.0e12, 300e9),
    "NVIDIA H100": _gpu("NVIDIA H100", 989e12, 3.35e12, 450e9),
    "NVIDIA B200": _gpu("NVIDIA B200", 2250e12, 8.0e12, 900e9),
    # On four H200s, 32,768 tokens of 40 heads of 128: 36.3 ms on one; 10.41 ms with K and V gathered (503 MB received)
    # and 10.01 ms with Ulysses (252 MB), where a quarter of the one would be 9.08 ms. HBM is published.
    "NVIDIA H200": Machine(
        6e14, HBM["NVIDIA H200"], 4.8e12, "switch", 380e9, 380e9, 270e9,
        "measured on 4 H200s with cuDNN: gather and exchange; a ring's hop taken as a gather's rate, HBM as published",
    ),
    "cpu": Machine(5e10, 8e9, 1e10, "switch", 5e9, 5e9, 5e9, "a rule: emulated devices share one memory"),
}  # fmt: skip
_LIKE = {"cpu": "cpu", "gpu": "NVIDIA H100", "tpu": "TPU v5p"}


def machine_of(target: Target) -> Machine:
    """Return the figures of a target, those of the usual machine of its platform for a kind that is not known."""
    return MACHINES.get(target.device_kind, MACHINES[_LIKE[target.platform]])
