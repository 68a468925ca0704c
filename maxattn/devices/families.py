"""Families of devices: the facts that all devices of one generation share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Platform = Literal["cpu", "gpu", "tpu"]
Capability = tuple[int, int]
"""The compute capability of an NVIDIA GPU: (10, 3) is 10.3."""
KIB = 2**10


@dataclass(frozen=True)
class Family:
    """One generation of devices."""

    name: str  # for example "hopper" or "tpu-v5p"
    # platform, vendor: for example "gpu" and "NVIDIA"
    platform: Platform
    vendor: str
    # words in jax's names that identify the family of a device without a row
    words: tuple[str, ...] = ()
    capability: Capability | None = None  # compute capability of the usual device; None if unknown
    sms: int = 0  # number of SMs of the usual device, or of an AMD GPU's compute units
    shared_memory: int = 0  # bytes of an SM that a thread block may use, 0 if unknown


def _nvidia(
    name: str, capability: Capability, words: tuple[str, ...], sms: int, shared_memory: int
) -> Family:
    return Family(name, "gpu", "NVIDIA", words, capability, sms, shared_memory * KIB)


# A device without a row has the first family with a word that is part of its name. Sources: compute
# capability: developer.nvidia.com's list of CUDA GPUs (jax reports a device's own, such as 8.9 in
# "before-hopper"); shared memory: NVIDIA's CUDA programming guide, and AMD's LDS.
GPU_FAMILIES = (
    Family("amd-cdna3", "gpu", "AMD", ("MI300", "MI325"), None, 304, 64 * KIB),
    Family("amd", "gpu", "AMD", ("AMD", "Instinct", "Radeon"), None, 132),
    _nvidia("hopper", (9, 0), ("H100", "H200", "H800", "H20"), 132, 227),
    _nvidia("blackwell-ultra", (10, 3), ("B300",), 148, 227),
    _nvidia("blackwell", (10, 0), ("B100", "B200"), 148, 227),
    _nvidia("blackwell-rtx", (12, 0), ("GeForce RTX 50", "RTX PRO", "NVIDIA GB10"), 170, 99),
    _nvidia("ampere", (8, 0), ("NVIDIA A100", "NVIDIA A30"), 108, 163),
    _nvidia("before-ampere", (7, 5), ("Tesla", "Quadro", "TITAN", "GeForce GTX",
                                      "GeForce RTX 20"), 72, 64),
    _nvidia("before-hopper", (8, 6), ("NVIDIA A10", "NVIDIA A40", "NVIDIA L4", "NVIDIA RTX",
                                      "NVIDIA GeForce"), 132, 99),
)  # fmt: skip
FAMILIES = {
    family.name: family
    for family in (
        Family("cpu", "cpu", ""),
        Family("tpu", "tpu", "Google"),
        *(Family(f"tpu-{n}", "tpu", "Google") for n in ("v4", "v5e", "v5p", "v6e", "v7x")),
        *GPU_FAMILIES,
        Family("nvidia", "gpu", "NVIDIA", (), None, 132),
    )
}
UNKNOWN = {"cpu": "cpu", "gpu": "nvidia", "tpu": "tpu"}
"""The family of a device whose platform alone is known."""

# Compute capabilities whose GPUs share the facts of another capability's family.
_ALIKE = {(7, 0): (7, 5), (8, 7): (8, 0), (8, 9): (8, 6), (12, 1): (12, 0)}


def read_capability(text: str) -> Capability | None:
    """Parse jax's text of a compute capability; None for text of AMD GPUs, such as "gfx942".

    >>> read_capability("10.3"), read_capability("gfx942")
    ((10, 3), None)
    """
    major, dot, minor = text.partition(".")
    return (int(major), int(minor)) if dot and f"{major}{minor}".isdecimal() else None


def with_capability(capability: Capability) -> Family:
    """Return the NVIDIA family with a compute capability; "nvidia" if no family has it."""
    alike = _ALIKE.get(capability, capability)
    found = (family for family in GPU_FAMILIES if family.capability == alike)
    return next(found, FAMILIES["nvidia"])
