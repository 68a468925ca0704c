"""The work of the row kernel, how threads share a row, and how many blocks are launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

WARP = 32
OCTET = 8  # channels that a thread takes in a pass
ONE_PASS = 64  # most octets of a row that a block computes in one pass
LARGEST_BLOCK = 384  # threads
MOST_PASSES = 4  # with more, registers run out
REGISTERS = 2**16  # in an SM
OTHERS = 33  # registers of a thread for addresses and sums
OF_A_BLOCK = 2048  # bytes of shared memory for the system, and for sums over warps
MOST_BLOCKS = 16  # resident in an SM


class VectorParts(NamedTuple):
    """A vector that scales or shifts tokens: the sum of one row from each array [B, F, R, D]."""

    rows: tuple[int, ...] = (0,)  # which of the R rows of each array
    constant: float = 0.0  # added to the sum


@dataclass(frozen=True)
class RowWork:
    """The work on a row of N heads of H channels, and the channels of each thread.

    z = x + bias; if x is added to another row, z = other + gate * (x + bias)
    y = rotate(norm(z) * scale + shift)

    `lanes` neighbouring threads share a head. Each thread has 8 neighbouring channels or, for the
    "half" style, 4 of each half of the head. A block computes `slots` heads in each of `passes`
    passes. Surplus threads repeat the last head or thread: they store the same numbers, and add
    nothing to sums. A LayerNorm has no heads: its channels are taken as heads of 8.

    Args:
        heads, head_dim: N and H.
        norm: RMS over each "head" or "across" all heads, "layer" for a LayerNorm, or None.
        eps: epsilon of the norm.
        style: style of the rotary embedding, "interleaved" or "half"; None for no rotation.
        vectors: (name, parts) of the bias, gate, scale and shift that are applied.

    >>> RowWork(12, 128, "across", 1e-6, "interleaved").threads
    96
    """

    heads: int
    head_dim: int
    norm: str | None
    eps: float
    style: str | None = None
    vectors: tuple[tuple[str, VectorParts], ...] = ()

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    @property
    def used_lanes(self) -> int:
        return self.head_dim // OCTET

    @property
    def lanes(self) -> int:
        """Return the threads of a head: a power of two, so that shuffles can sum over them."""
        return 1 << (self.used_lanes - 1).bit_length()

    @property
    def slots(self) -> int:
        """Return how many heads a block computes at a time: whole warps, full if possible."""
        octets = self.heads * self.lanes
        fewest = 1 if octets <= ONE_PASS else max(2, -(-octets // LARGEST_BLOCK))
        full = (p for p in (fewest, fewest + 1) if octets % (p * WARP) == 0)
        need, of_warp = -(-self.heads // next(full, fewest)), max(1, WARP // self.lanes)
        return -(-need // of_warp) * of_warp

    @property
    def passes(self) -> int:
        return -(-self.heads // self.slots)

    @property
    def threads(self) -> int:
        return self.lanes * self.slots

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def is_full(self) -> bool:
        """Check whether no thread is surplus."""
        return OCTET * self.threads * self.passes == self.channels

    def of_warp(self, warp: int) -> int:
        """Return the number of channels of a warp, without those of surplus threads."""
        threads = range(warp * WARP, (warp + 1) * WARP)
        return OCTET * sum(
            t % self.lanes < self.used_lanes and t // self.lanes + p * self.slots < self.heads
            for t in threads
            for p in range(self.passes)
        )

    def fits(self) -> bool:
        """Check whether a thread block can compute a row of these heads."""
        if self.heads < 1 or self.head_dim < OCTET or self.head_dim % OCTET:
            return False
        return self.lanes <= WARP and self.passes <= MOST_PASSES and self.threads <= LARGEST_BLOCK


@dataclass(frozen=True)
class RowLaunch:
    """How rows are divided among thread blocks; threads keep the vectors in registers."""

    work: RowWork
    widths: tuple[int, ...]  # bytes of a number, for each array of rows that is read
    sms: int  # streaming multiprocessors (SMs) of the GPU
    shared: int  # bytes of shared memory of an SM

    @property
    def stages(self) -> int:
        """Return how many rows a block has in shared memory: one is computed, others arrive."""
        most = 1 + len(self.widths)
        return most if self._bytes(most) <= self.shared else 2

    @property
    def per_sm(self) -> int:
        """Return how many blocks an SM runs at once, limited by registers and shared memory."""
        work, arrays = self.work, len(self.work.vectors) + 2 * len(self.widths) - 1
        registers = OTHERS + OCTET * work.passes * arrays
        by_registers = REGISTERS // (registers * work.threads)
        return max(1, min(by_registers, self.shared // self._bytes(self.stages), MOST_BLOCKS))

    @property
    def blocks(self) -> int:
        """Return how many blocks the GPU runs at once; no more blocks are launched."""
        return self.sms * self.per_sm

    def fits(self) -> bool:
        return self.work.fits() and self._bytes(2) <= self.shared

    def _bytes(self, stages: int) -> int:
        """Return the bytes of shared memory of a block; each thread copies the angles."""
        work = self.work
        angles = 0 if work.style is None else 4 * OCTET
        stage = OCTET * work.passes * sum(self.widths) + angles
        return OF_A_BLOCK + work.threads * stages * stage
