"""Every device that maxattn knows: one row a kind, and the one function that finds a row by name.

All figures are of one device as jax lists it: of a TPU v7x that is half a chip. No other file tests
a part of a device's name; they ask a row for its family, its vendor or its figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from maxattn.target import Target

Platform = Literal["cpu", "gpu", "tpu"]
Link = Literal["torus", "switch", "mesh"]
KIB, MIB, GIB = 2**10, 2**20, 2**30


class Machine(NamedTuple):
    """Hold what one device computes, holds and receives in a second.

    Args:
        flops: FLOP/s that an attention kernel reaches in bfloat16, forward and backward together.
        memory: bytes of HBM that a program may use.
        hbm: bytes/s of HBM that merges and sums reach.
        link: "torus" (each device has two neighbours along an axis), "switch" (all reach all at
            full rate) or "mesh" (every pair of a host's devices has a link of its own).
        neighbour: bytes/s that a device receives from one other: a hop of a ring.
        gather: bytes/s received in an all-gather; on a mesh it follows from `neighbour`.
        exchange: bytes/s received in an all-to-all, on a switch; else it follows from `neighbour`.
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

    def gathered(self, n: int) -> float:
        """Return bytes/s received in an all-gather of n devices."""
        return self._of_links(n) if self.link == "mesh" else self.gather

    def exchanged(self, n: int) -> float:
        """Return bytes/s received in an all-to-all of n devices.

        On a ring of n with both directions in use, n L bytes take n L / (8 w): of the (n - 1) L / n
        that a device receives, most pass through others on the way.
        """
        if self.link == "mesh":
            return self._of_links(n)
        return self.exchange if self.link == "switch" else 8 * self.neighbour * (n - 1) / n**2

    def permuted(self, n: int) -> float:
        """Return bytes/s received in a permute of n devices, from one other that may be far."""
        return self.neighbour if self.link == "mesh" else self.exchanged(n)

    def _of_links(self, n: int) -> float:
        """Return bytes/s over the links that a device has to n - 1 others of its host."""
        return self.neighbour * (min(n, HOST) - 1)


HOST = 8
"""Devices of a host whose devices are a mesh."""
START = 1e-5
"""Seconds from the start of a transfer, or of a kernel, to its first byte or product: a rule, not
measured by us.
"""


# ---- families ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Hold what the devices of one generation share.

    Args:
        name: for example "hopper" or "tpu-v5p".
        platform, vendor: for example "gpu" and "NVIDIA".
        words: parts of jax's names by which a device without a row of its own is recognised.
        cudnn_head_dim, fa4_head_dim: the largest head dim of cuDNN's and of FlashAttention-4's
            kernels.
        sms: streaming multiprocessors of its usual device; AMD's compute units.
        shared_memory: bytes that one of them gives a thread block; 0 where that is not known.
    """

    name: str
    platform: Platform
    vendor: str
    words: tuple[str, ...] = ()
    cudnn_head_dim: int = 256
    fa4_head_dim: int = 256
    sms: int = 132
    shared_memory: int = 0


def _nvidia(name: str, words: tuple[str, ...], **facts: int) -> Family:
    return Family(name, "gpu", "NVIDIA", words, **facts)


# The first whose word is part of the name is taken. Shared memory: NVIDIA's CUDA programming guide,
# compute capabilities 8.0, 9.0 and 10.0; AMD's LDS.
GPU_FAMILIES = (
    Family("amd-cdna3", "gpu", "AMD", ("MI300", "MI325"), sms=304, shared_memory=64 * KIB),
    Family("amd", "gpu", "AMD", ("AMD", "Instinct", "Radeon")),
    _nvidia("hopper", ("H100", "H200", "H800", "H20"), shared_memory=227 * KIB),
    _nvidia("blackwell", ("B100", "B200", "B300"), fa4_head_dim=128, sms=148,
            shared_memory=227 * KIB),
    _nvidia("ampere", ("NVIDIA A100",), cudnn_head_dim=128, sms=108, shared_memory=163 * KIB),
    _nvidia("before-hopper", ("NVIDIA A10", "NVIDIA A30", "NVIDIA A40", "NVIDIA L4", "NVIDIA RTX",
                              "NVIDIA GeForce"), cudnn_head_dim=128),
)  # fmt: skip
FAMILIES = {
    family.name: family
    for family in (
        Family("cpu", "cpu", ""),
        Family("tpu", "tpu", "Google"),
        *(Family(f"tpu-{n}", "tpu", "Google") for n in ("v4", "v5e", "v5p", "v6e", "v7x")),
        *GPU_FAMILIES,
        _nvidia("nvidia", ()),
    )
}
_UNKNOWN = {"cpu": "cpu", "gpu": "nvidia", "tpu": "tpu"}
# Devices that have fewer multiprocessors (AMD: compute units) than their family's usual one. PCIe:
# the H100 and H800 of that form.
_FEWER_SMS = {"hopper": {"H20": 78, "PCIe": 114}, "amd-cdna3": {"MI300A": 228}}


# ---- devices -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """Hold one kind of device.

    Args:
        kind: our name of it, or jax's of a kind that has no row.
        family: its generation.
        sms: streaming multiprocessors (SMs) of a GPU.
        peak: dense bfloat16 FLOP/s, as the maker gives them; None where that is not known.
        machine: what the cost model of context parallelism takes; None where that is not known.
        vmem: bytes of VMEM that a TPU's compiler gives one kernel unless told otherwise.
    """

    kind: str
    family: Family
    sms: int = 0
    peak: float | None = None
    machine: Machine | None = None
    vmem: int = 0

    @property
    def platform(self) -> Platform:
        """Return "cpu", "gpu" or "tpu"."""
        return self.family.platform

    @property
    def vendor(self) -> str:
        """Return who makes it, "" for a CPU."""
        return self.family.vendor

    @property
    def memory(self) -> float | None:
        """Return bytes of HBM that a program may use, None where that is not known."""
        return self.machine.memory if self.machine and self.platform != "cpu" else None

    def is_a(self, *families: str) -> bool:
        """Tell whether it is of one of the families."""
        return self.family.name in families


_TPU = "published per-chip figures, not measured by us; 60% of the peak FLOP/s assumed"
_GPU = "published figures, not measured by us; 60% of the peak FLOP/s and 75% of the link assumed"
# NCCL's kernels take SMs from the kernel beside them. A ring of four over FlashAttention-4, 14B
# 480p, on two H200s: a step of 34.1 ms, without its transfers 32.1; they are nine hops of 0.79 ms.
_NCCL = (34.1 - 32.1) / (9 * 0.79)


def _tpu(
    version: str, peak: float, memory: float, hbm: float, link: float, vmem: int,
    source: str = _TPU,
) -> Device:  # fmt: skip
    machine = Machine(0.6 * peak, memory, hbm, "torus", link, 2 * link, 0.0, source)
    return Device(f"TPU {version}", FAMILIES[f"tpu-{version}"], 0, peak, machine, vmem)


def _gpu(kind: str, family: str, peak: float, memory: float, hbm: float, link: float) -> Device:
    rate = 0.75 * link
    machine = Machine(0.6 * peak, memory, hbm, "switch", rate, rate, rate, _GPU, _NCCL)
    return Device(kind, FAMILIES[family], FAMILIES[family].sms, peak, machine)


def _measured_h200() -> Device:
    # gather, exchange: four H200s over cuDNN, 32,768 tokens of 40 heads of 128, forward: 36.3 ms on
    # one; 10.41 ms with K and V gathered (503 MB received) and 10.01 with Ulysses (252 MB), where a
    # quarter of the one would be 9.08. The rest: four over FlashAttention-4, 14B 480p. flops: what
    # training steps with all-gather and Ulysses leave for the kernel, less those transfers.
    # neighbour: nine hops of 168 MB in 7.1 ms, beside kernels. hbm: 3.7 GB of packing and sums in
    # 1.2 ms.
    source = "measured on 4 H200s"
    machine = Machine(6.2e14, 141e9, 3.1e12, "switch", 212e9, 380e9, 270e9, source, _NCCL)
    return Device("NVIDIA H200", FAMILIES["hopper"], 132, 989e12, machine)


def _mi300x() -> Device:
    # As AMD gives it: 1307.4 TFLOP/s, 192 GB of HBM3 at 5.3 TB/s, 304 compute units; seven links of
    # 128 GB/s, both directions together. Of a host's eight GPUs, n use n - 1 links of each.
    link, peak = 0.75 * 64e9, 1307e12
    rates = link, (HOST - 1) * link, (HOST - 1) * link
    machine = Machine(0.6 * peak, 192e9, 5.3e12, "mesh", *rates, _GPU, _NCCL)
    return Device("AMD Instinct MI300X", FAMILIES["amd-cdna3"], 304, peak, machine)


def _cpu() -> Device:
    source = "a rule: emulated devices share one memory"
    machine = Machine(5e10, 8e9, 1e10, "switch", 5e9, 5e9, 5e9, source)
    return Device("cpu", FAMILIES["cpu"], machine=machine)


# Peak: dense bfloat16 FLOP/s, as the maker gives them. Of v7x the maker gives a chip's, 2307e12:
# libtpu lists each of its two cores as a device, with half of the products, of the memory and of
# the memory's rate. (Of v4 and v5p a program's device is a whole chip, though a bare topology of v4
# lists two cores.)
# Memory: bytes that a program may use. TPUs: what libtpu 0.0.42 says when a program needs more
# ("exceeds available HBM (95.74G)"). GPUs: the card's memory as its maker sells it.
# Link: one direction of one inter-chip link (TPU), of all NVLinks of a GPU. A ring through both
# halves of each v7x chip crosses a chip's link once.
# VMEM: what libtpu 0.0.42 states in the message of a kernel that needs more.
DEVICES: dict[str, Device] = {
    device.kind: device
    for device in (
        _cpu(),
        #    kind    peak FLOP/s      memory   HBM B/s  link B/s  VMEM
        _tpu("v4",   275e12,  30.75 * GIB,    1.2e12,   45e9, 16 * MIB),
        _tpu("v5e",  197e12,  15.75 * GIB,   0.82e12,   45e9, 16 * MIB),
        _tpu("v5p",  459e12,  95.74 * GIB,   2.77e12,   90e9, 16 * MIB),
        _tpu("v6e",  918e12,  31.25 * GIB,   1.64e12,   90e9, 32 * MIB),
        _tpu("v7x", 1153e12,  94.75 * GIB,    3.7e12,   90e9, 32 * MIB, f"half of {_TPU}"),
        _gpu("NVIDIA A100", "ampere",    312e12,  80e9,  2.0e12, 300e9),
        _gpu("NVIDIA H100", "hopper",    989e12,  80e9, 3.35e12, 450e9),
        _measured_h200(),
        _gpu("NVIDIA B200", "blackwell", 2250e12, 180e9, 8.0e12, 900e9),
        _mi300x(),
    )
}  # fmt: skip
# The device whose figures stand for a platform, and for a kind that has none of its own.
USUAL = {"cpu": "cpu", "gpu": "NVIDIA H100", "tpu": "TPU v5p"}
SMS = DEVICES["NVIDIA H200"].sms  # of the GPU that launches are tuned for
# jax's spellings that do not begin with ours.
_ALIASES = {
    "TPU v5 lite": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "TPU7x": "TPU v7x",
}


# ---- finding a row -------------------------------------------------------------------------------


def device_kind(spelling: str) -> str:
    """Return our name of what jax calls a device."""
    return _ALIASES.get(spelling, spelling)


@lru_cache(maxsize=64)
def device_of(kind: str, platform: Platform = "gpu") -> Device:
    """Return the row of a device kind; of a kind without one, its family's facts and no figures.

    >>> device_of("NVIDIA H100 80GB HBM3").kind
    'NVIDIA H100'
    >>> device_of("NVIDIA H20").family.name, device_of("NVIDIA H20").sms
    ('hopper', 78)

    Args:
        kind: jax's name of it, or ours.
        platform: of a kind that is not known at all.
    """
    kind = device_kind(kind)
    row = next((d for d in DEVICES.values() if _names(d.kind, kind)), None)
    if row is None:
        family = _family_of(kind, platform)
        row = Device(kind, family, family.sms if family.platform == "gpu" else 0)
    return replace(row, sms=_sms(row, kind))


def _names(row: str, kind: str) -> bool:
    """Tell whether a kind is a row's, for example "NVIDIA H100 80GB HBM3" the H100's."""
    return kind == row or kind.startswith((f"{row} ", f"{row}-"))


def _family_of(kind: str, platform: Platform) -> Family:
    families = GPU_FAMILIES if platform == "gpu" else ()
    found = (family for family in families if any(word in kind for word in family.words))
    return next(found, FAMILIES[_UNKNOWN[platform]])


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
