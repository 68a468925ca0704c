"""A row for every device kind that maxattn knows.

All numbers are for one device as jax lists it: a device of TPU v7x is half a chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from maxattn.devices.families import FAMILIES, Capability, Family, Platform

Link = Literal["torus", "switch", "mesh"]
MIB, GIB = 2**20, 2**30


class Machine(NamedTuple):
    """The rates and the memory of one device."""

    # FLOP/s that an attention kernel reaches in bfloat16, forward and backward together
    flops: float
    memory: float  # bytes of HBM that a program may use
    hbm: float  # bytes/s of HBM that merges and sums reach
    # "torus" (each device has two neighbours along an axis), "switch" (each device reaches every
    # other at the full rate) or "mesh" (each pair of a host's devices has a link)
    link: Link
    neighbour: float  # bytes/s that a device receives from one other device, as in a hop of a ring
    gather: float  # bytes/s that a device receives in an all-gather; a mesh uses `neighbour`
    exchange: float  # bytes/s received in an all-to-all on a switch; other links use `neighbour`
    source: str  # the source of the rates
    slowed: float = 0.0  # share of a kernel's rate that is lost while a transfer overlaps with it

    def gathered(self, n: int) -> float:
        """Return the bytes/s that a device receives in an all-gather of n devices."""
        return self._of_links(n) if self.link == "mesh" else self.gather

    def exchanged(self, n: int) -> float:
        """Return the bytes/s that a device receives in an all-to-all of n devices."""
        if self.link == "mesh":
            return self._of_links(n)
        # On a ring of n devices with L bytes each, links of w bytes/s each way take n L / (8 w):
        # most of the (n - 1) L/n bytes that a device receives pass through other devices.
        return self.exchange if self.link == "switch" else 8 * self.neighbour * (n - 1) / n**2

    def permuted(self, n: int) -> float:
        """Return the bytes/s that a device receives from another in a permute of n devices."""
        return self.neighbour if self.link == "mesh" else self.exchanged(n)

    def _of_links(self, n: int) -> float:
        return self.neighbour * (min(n, HOST) - 1)


class TensorCore(NamedTuple):
    """The clock and the matrix units of a TPU."""

    clock: float  # cycles per second
    units: int  # number of matrix units of a core
    side: int  # number of rows, and of columns, of a matrix unit
    rows: int  # number of bfloat16 rows of an operand that a matrix unit reads per cycle
    cores: int  # number of a device's cores, which share the parallel axes of a kernel's grid

    @property
    def peak(self) -> float:
        """Return the peak bfloat16 FLOP/s of a device."""
        return 2.0 * self.clock * self.units * self.side**2 * self.rows * self.cores


HOST = 8
"""The number of devices of a host whose devices are a mesh."""
START = 1e-5
"""Seconds from the start of a transfer or kernel to its first byte or product; not measured."""


# ---- devices -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """One kind of device."""

    kind: str  # the row's name; jax's name for a kind without a row
    family: Family  # the generation of the device
    # number of a GPU's streaming multiprocessors (SMs), or of an AMD GPU's compute units
    sms: int = 0
    peak: float | None = None  # dense bfloat16 FLOP/s that the maker publishes; None if unknown
    machine: Machine | None = None  # rates for estimates of time; None if unknown
    vmem: int = 0  # bytes of VMEM that a TPU's compiler gives one kernel by default
    capability: Capability | None = None  # the compute capability of an NVIDIA GPU; None if unknown
    core: TensorCore | None = None  # clock and matrix units of a TPU; None if unknown

    @property
    def platform(self) -> Platform:
        return self.family.platform

    @property
    def vendor(self) -> str:
        return self.family.vendor

    @property
    def memory(self) -> float | None:
        """Return the bytes of HBM that a program may use; None if unknown."""
        return self.machine.memory if self.machine and self.platform != "cpu" else None

    @property
    def capability_text(self) -> str:
        """Return the compute capability as text, such as "10.3"; "" without one."""
        return ".".join(map(str, self.capability or ()))

    def is_a(self, *families: str) -> bool:
        """Check whether the device's family is one of `families`."""
        return self.family.name in families


_TPU = "published per-chip figures, not measured by us; 60% of the peak FLOP/s assumed"
_GPU = (
    "published figures, not measured by us; 60% of the peak FLOP/s, 65% of the HBM's rate and 75%"
    " of the link assumed"
)
REACHED = 3.1 / 4.8  # share of the published HBM rate that merges and sums reach on H200s
# NCCL's kernels take SMs from attention kernels. On two H200s, a step of Wan 14B at 480p, a ring of
# four over FlashAttention-4, took 34.1 ms, and 32.1 ms without its nine hops of 0.79 ms.
_NCCL = (34.1 - 32.1) / (9 * 0.79)


# Matrix units and their sides as Google publishes them for v4 to v6e. Clock and rows per cycle are
# chosen to give the published peak; the compiler's schedules for v6e have the same rows.
_CORES = {
    #               clock, units, side, rows, cores
    "v4":  TensorCore(1.05e9, 4, 128, 1, 2),
    "v5e": TensorCore(1.5e9,  4, 128, 1, 1),
    "v5p": TensorCore(1.75e9, 4, 128, 1, 2),
    "v6e": TensorCore(1.75e9, 2, 256, 2, 1),
    "v7x": TensorCore(2.2e9,  2, 256, 2, 1),
}  # fmt: skip


def _tpu(
    version: str, peak: float, memory: float, hbm: float, link: float, vmem: int,
    source: str = _TPU,
) -> Device:  # fmt: skip
    machine = Machine(0.6 * peak, memory, hbm, "torus", link, 2 * link, 0.0, source)
    family, core = FAMILIES[f"tpu-{version}"], _CORES[version]
    return Device(f"TPU {version}", family, 0, peak, machine, vmem, core=core)


def _gpu(
    kind: str, family: str, peak: float, memory: float, hbm: float, link: float, sms: int
) -> Device:
    rate, its = 0.75 * link, FAMILIES[family]
    reached = 0.6 * peak, memory, REACHED * hbm
    machine = Machine(*reached, "switch", rate, rate, rate, _GPU, _NCCL)
    return Device(f"NVIDIA {kind}", its, sms, peak, machine, 0, its.capability)


def _h200() -> Device:
    # gather, exchange: cuDNN forwards of 32,768 tokens, 40 heads of 128: 36.3 ms on one H200, a
    # quarter of which is 9.08; on four, 10.41 ms with all-gather (503 MB received) and 10.01 with
    # Ulysses (252 MB). All others: Wan 14B at 480p, FlashAttention-4 on four. flops: training steps
    # with all-gather and Ulysses, less their transfers. neighbour: nine hops of 168 MB in 7.1 ms,
    # beside kernels. hbm: 3.7 GB of packing and sums in 1.2 ms.
    source = "measured on 4 H200s"
    machine = Machine(6.2e14, 141e9, 3.1e12, "switch", 212e9, 380e9, 270e9, source, _NCCL)
    return Device("NVIDIA H200", FAMILIES["hopper"], 132, 989e12, machine, 0, (9, 0))


def _mi300x() -> Device:
    # Published by AMD: 1307.4 TFLOP/s, 192 GB of HBM3 at 5.3 TB/s, 304 compute units; seven links
    # of 128 GB/s, both directions together. If n of a host's eight GPUs run, each uses n - 1 links.
    link, peak = 0.75 * 64e9, 1307e12
    rates = link, (HOST - 1) * link, (HOST - 1) * link
    machine = Machine(0.6 * peak, 192e9, REACHED * 5.3e12, "mesh", *rates, _GPU, _NCCL)
    return Device("AMD Instinct MI300X", FAMILIES["amd-cdna3"], 304, peak, machine)


def _cpu() -> Device:
    source = "assumed, since emulated devices share one memory"
    machine = Machine(5e10, 8e9, 1e10, "switch", 5e9, 5e9, 5e9, source)
    return Device("cpu", FAMILIES["cpu"], machine=machine)


# Peak: dense bfloat16 FLOP/s of one device, as published. v7x: a chip has 2307e12; libtpu lists
# each of its two cores as a device, with half of the FLOP/s, the memory and the memory's rate. (A
# v4 or v5p device is a whole chip.) B200: DGX B200's 36 PFLOP/s, halved to be without sparsity, and
# 1.44 TB, over eight GPUs. B300: B200's FLOP/s, and 270 GB (MLPerf's systems). GB200, GB300: an
# NVL72's 180 PFLOP/s over 72; 186 and 288 GB (MLPerf's systems). GH200: the version with HBM3. RTX:
# NVIDIA's RTX Blackwell paper; sums in float32, which GeForce does at half the rate of RTX PRO.
# Memory: TPUs: the limit in libtpu 0.0.42's message ("exceeds available HBM (95.74G)"); GPUs: as
# sold. VMEM: libtpu 0.0.42's message of a kernel that needs more.
# SMs: NVIDIA's papers of each architecture; for H20, the count of its driver.
# Link, one direction: one inter-chip link of a TPU, all NVLinks of a GPU, or a card's 16 lanes of
# PCIe 5.0. A ring through both halves of each v7x chip crosses a chip's link once. NVLink joins the
# 8 GPUs of a B200 or B300 host, and 72 GPUs of 18 GB200 or GB300 hosts, at the full rate.
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
        #    kind         family             peak FLOP/s  memory   HBM B/s  link B/s  SMs
        _gpu("A100",      "ampere",           312e12,  80e9,  2.0e12, 300e9, 108),
        _gpu("H20",       "hopper",           148e12,  96e9,  4.0e12, 450e9,  78),
        _gpu("H100",      "hopper",           989e12,  80e9, 3.35e12, 450e9, 132),
        _gpu("H100 PCIe", "hopper",           756e12,  80e9,  2.0e12,  64e9, 114),
        _gpu("H800",      "hopper",           989e12,  80e9, 3.35e12, 200e9, 132),
        _gpu("H800 PCIe", "hopper",           756e12,  80e9,  2.0e12,  64e9, 114),
        _h200(),
        _gpu("GH200",     "hopper",           989e12,  96e9,  4.0e12, 450e9, 132),
        _gpu("B200",      "blackwell",       2250e12, 180e9,  8.0e12, 900e9, 148),
        _gpu("GB200",     "blackwell",       2500e12, 186e9,  8.0e12, 900e9, 152),
        _gpu("B300",      "blackwell-ultra", 2250e12, 270e9,  8.0e12, 900e9, 148),
        _gpu("GB300",     "blackwell-ultra", 2500e12, 288e9,  8.0e12, 900e9, 152),
        _gpu("GeForce RTX 5090",    "blackwell-rtx", 209.5e12, 32e9, 1.792e12, 64e9, 170),
        _gpu("GeForce RTX 5080",    "blackwell-rtx", 112.6e12, 16e9, 0.960e12, 64e9, 84),
        _gpu("GeForce RTX 5070 Ti", "blackwell-rtx",  87.9e12, 16e9, 0.896e12, 64e9, 70),
        _gpu("GeForce RTX 5070",    "blackwell-rtx",  61.7e12, 12e9, 0.672e12, 64e9, 48),
        _gpu("RTX PRO 6000 Blackwell", "blackwell-rtx", 503.8e12, 96e9, 1.6e12, 64e9, 188),
        _mi300x(),
    )
}  # fmt: skip
# The device whose rates are used for a platform, and for a kind without rates.
USUAL = {"cpu": "cpu", "gpu": "NVIDIA H100", "tpu": "TPU v5p"}
