"""What is known of devices: one row a kind (rows.py), and the one function that finds it by name.

No other file tests a part of a device's name; they ask a row for its family, its compute
capability, its vendor or its figures.
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
from maxattn.devices.rows import DEVICES, GIB, MIB, SMS, START, USUAL, Device, Machine, TensorCore

if TYPE_CHECKING:
    from maxattn.target import Target

__all__ = ["DEVICES", "GIB", "MIB", "SMS", "START", "USUAL", "Capability", "Device", "Machine",
           "Platform", "TensorCore", "device_kind", "device_of", "machine_of", "memory_of",
           "peak_flops"]  # fmt: skip
# jax's spellings that do not begin with ours.
_ALIASES = {
    "TPU v5 lite": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "TPU7x": "TPU v7x",
}
# Words behind a row's name that make another card of it: "NVIDIA GeForce RTX 5090 Laptop GPU".
_OTHER_CARDS = {"Laptop", "D", "Ti", "SUPER", "Max-Q"}
# Devices that have fewer multiprocessors (AMD: compute units) than their family's usual one. PCIe:
# the H100 and H800 of that form.
_FEWER_SMS = {
    "hopper": {"H20": 78, "PCIe": 114},
    "ampere": {"A30": 56},
    "amd-cdna3": {"MI300A": 228},
}


# ---- finding a row -------------------------------------------------------------------------------


def device_kind(spelling: str) -> str:
    """Return our name of what jax calls a device."""
    return _ALIASES.get(spelling, spelling)


@lru_cache(maxsize=64)
def device_of(
    kind: str, platform: Platform = "gpu", capability: Capability | None = None
) -> Device:
    """Return the row of a device kind; of a kind without one, its family's facts and no figures.

    >>> device_of("NVIDIA H100 80GB HBM3").kind
    'NVIDIA H100'
    >>> device_of("NVIDIA H20").family.name, device_of("NVIDIA H20").sms
    ('hopper', 78)

    Args:
        kind: jax's name of it, or ours.
        platform: of a kind that is not known at all.
        capability: the compute capability that jax gives; None where none is known, and that of its
            family is taken.
    """
    kind = device_kind(kind)
    row = max((d for d in DEVICES.values() if _names(d.kind, kind)), key=_length, default=None)
    if row is None:
        family = _family_of(kind, platform, capability)
        row = Device(kind, family, family.sms if family.platform == "gpu" else 0)
    known = capability or row.family.capability
    return replace(row, sms=_sms(row, kind), capability=known)


def _length(device: Device) -> int:
    return len(device.kind)


def _names(row: str, kind: str) -> bool:
    """Tell whether a kind is a row's, for example "NVIDIA H100 80GB HBM3" the H100's."""
    if kind == row:
        return True
    rest = kind.removeprefix(row)
    return rest != kind and rest[0] in " -" and not _OTHER_CARDS & set(rest.split())


def _family_of(kind: str, platform: Platform, capability: Capability | None) -> Family:
    families = GPU_FAMILIES if platform == "gpu" else ()
    found = (family for family in families if any(word in kind for word in family.words))
    named = next(found, FAMILIES[UNKNOWN[platform]])
    return with_capability(capability) if capability and named.vendor == "NVIDIA" else named


def _sms(row: Device, kind: str) -> int:
    fewer = _FEWER_SMS.get(row.family.name, {})
    words = kind.replace("-", " ").split()
    return next((n for name, n in fewer.items() if name in words), row.sms)


# ---- figures -------------------------------------------------------------------------------------


def machine_of(target: Target) -> Machine:
    """Return the figures of a target, those of the usual device of its platform where it has
    none.
    """
    device = target.device
    usual = "AMD Instinct MI300X" if device.vendor == "AMD" else USUAL[device.platform]
    machine = device.machine or DEVICES[usual].machine
    assert machine is not None, usual
    return machine


def memory_of(kind: str) -> float | None:
    """Return bytes of HBM that a program may use, None for other spellings than a row's.

    A longer name can be of a card with another memory, such as "NVIDIA A100-SXM4-40GB".
    """
    return DEVICES[kind].memory if kind in DEVICES else None


def peak_flops(kind: str) -> float | None:
    """Return dense bfloat16 FLOP/s of a device kind, None where they are not known."""
    return device_of(kind).peak
