"""Facts about devices: a row per device kind (rows.py), and the function that finds a row by name.

Other files read a row's family, compute capability, vendor, SMs or rates; none tests a name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from maxattn.devices.families import (
    FAMILIES,
    GPU_FAMILIES,
    UNKNOWN,
    Capability,
    Family,
    Platform,
    with_capability,
)
from maxattn.devices.rows import DEVICES, GIB, MIB, START, USUAL, Device, Machine, TensorCore

if TYPE_CHECKING:
    from maxattn.target import Target

__all__ = ["DEVICES", "GIB", "MIB", "START", "USUAL", "Capability", "Device", "Machine", "Platform",
           "TensorCore", "device_kind", "device_of", "machine_of", "memory_of",
           "peak_flops"]  # fmt: skip
# jax's names that do not begin with the row's name.
_ALIASES = {
    "TPU v5 lite": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "TPU7x": "TPU v7x",
}
# After a row's name, these words make it another card: "NVIDIA GeForce RTX 5090 Laptop GPU".
_OTHER_CARDS = {"Laptop", "D", "Ti", "SUPER", "Max-Q"}
# SMs (AMD: compute units) of devices without a row, by a word of their names.
_SMS = {"A10": 72, "A10G": 80, "A30": 56, "A40": 84, "L4": 58, "L40": 142, "L40S": 142, "T4": 40,
        "V100": 80, "3090": 82, "4090": 128, "MI300A": 228}  # fmt: skip


# ---- finding a row -------------------------------------------------------------------------------


def device_kind(spelling: str) -> str:
    """Return the name of a device's row; jax's name of the device may differ."""
    return _ALIASES.get(spelling, spelling)


@lru_cache(maxsize=64)
def device_of(
    kind: str, platform: Platform = "gpu", capability: Capability | None = None, sms: int = 0
) -> Device:
    """Return the row of a device kind; if it has none, the facts of its family, without rates.

    >>> device_of("NVIDIA H100 80GB HBM3").kind, device_of("NVIDIA H100 80GB HBM3").sms
    ('NVIDIA H100', 132)
    >>> device_of("NVIDIA H100 PCIe").sms, device_of("NVIDIA H20").sms
    (114, 78)

    The kind is jax's name or the row's name. The platform is used if the kind's family is unknown.
    A given capability and a given number of SMs replace the row's.
    """
    kind = device_kind(kind)
    rows = (row for row in DEVICES.values() if _names(row.kind, kind))
    row = max(rows, key=lambda row: len(row.kind), default=None)
    if row is None:
        family = _family_of(kind, platform, capability)
        known = (n for word, n in _SMS.items() if word in kind.replace("-", " ").split())
        row = Device(kind, family, next(known, family.sms))
    capability = capability or row.family.capability
    return replace(row, sms=sms or row.sms, capability=capability)


def _names(row: str, kind: str) -> bool:
    """Check whether `kind` names the device of `row`, as "NVIDIA H100 80GB HBM3" names the H100."""
    rest = kind.removeprefix(row)
    is_longer = rest != kind and rest[:1] in (" ", "-")
    return kind == row or (is_longer and not _OTHER_CARDS & {*rest.split()})


def _family_of(kind: str, platform: Platform, capability: Capability | None) -> Family:
    families = GPU_FAMILIES if platform == "gpu" else ()
    found = (family for family in families if any(word in kind for word in family.words))
    named = next(found, FAMILIES[UNKNOWN[platform]])
    return with_capability(capability) if capability and named.vendor == "NVIDIA" else named


# ---- rates and memory ----------------------------------------------------------------------------


def machine_of(target: Target) -> Machine:
    """Return a target's rates; if they are unknown, the rates of its platform's usual device."""
    device = target.device
    usual = "AMD Instinct MI300X" if device.vendor == "AMD" else USUAL[device.platform]
    machine = device.machine or DEVICES[usual].machine
    assert machine is not None, usual
    return machine


def memory_of(kind: str) -> float | None:
    """Return the bytes of HBM that a program may use; None unless `kind` is a row's full name.

    A longer name may be a card with another memory size, such as "NVIDIA A100-SXM4-40GB".
    """
    return DEVICES[kind].memory if kind in DEVICES else None


def peak_flops(kind: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a device kind, or None if unknown."""
    return device_of(kind).peak
