"""How the CuTe kernel of the adaptive norm shares a row among the threads of a block, and how many
blocks it launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.modules.adaptive_layer_norm.vectors import VectorParts

WARP = 32
OCTET = 8  # channels that a thread loads together: 16 bytes of them in 16 bits
ONE_PASS = 64  # octets, up to which a block takes a row in one pass
LARGEST_BLOCK = 384  # threads
MOST_PASSES = 4  # beyond, registers run out
REGISTERS = 2**16  # of an SM
OTHERS = 40  # registers of a thread for addresses and sums
STAGES = 3  # rows that a block has in shared memory: one is computed, others arrive
SHARED = 2048  # bytes of a block besides: the system's, and sums over warps
MOST_BLOCKS = 16  # of an SM


@dataclass(frozen=True)
class NormThreads:
    """Say which thread takes which channels of a row.

    Neighbouring threads take neighbouring octets; a block takes all of them in `passes` passes.
    Threads that are left over repeat what the last octet's does, and moments leave them out.

    >>> NormThreads(1536).threads, NormThreads(1536).passes
    (96, 2)
    """

    channels: int

    @property
    def octets(self) -> int:
        """Return the octets of a row."""
        return self.channels // OCTET

    @property
    def passes(self) -> int:
        """Return in how many passes a block takes a row: few, and full ones where that goes."""
        if self.octets <= ONE_PASS:
            return 1
        fewest = max(2, -(-self.octets // LARGEST_BLOCK))
        full = (p for p in (fewest, fewest + 1) if self.octets % (p * WARP) == 0)
        return next(full, fewest)

    @property
    def threads(self) -> int:
        """Return the threads of a block: whole warps."""
        return WARP * -(-self.octets // (self.passes * WARP))

    @property
    def warps(self) -> int:
        """Return the warps of a block."""
        return self.threads // WARP

    @property
    def are_full(self) -> bool:
        """Say whether each thread has an octet of its own in each pass."""
        return self.octets == self.passes * self.threads

    def of_warp(self, warp: int) -> int:
        """Return how many channels a warp has of its own."""
        first = (p * self.threads + warp * WARP for p in range(self.passes))
        return OCTET * sum(min(max(self.octets - n, 0), WARP) for n in first)

    def fits(self) -> bool:
        """Say whether a block can share such a row."""
        return self.channels % OCTET == 0 and self.channels > 0 and self.passes <= MOST_PASSES


@dataclass(frozen=True)
class NormLaunch:
    """Say how rows are shared among blocks.

    Args:
        threads: that share a row.
        eps: added to the variance.
        vectors: that come with the rows, by name: "scale" and "shift" of the norm, those that there
            are, and "gate" and "bias" of a branch.
        widths: bytes of a number of the rows that are read: of x, and of the branch.
        sms: streaming multiprocessors (SMs) of the GPU.
        shared: bytes of shared memory that one of them gives.
    """

    threads: NormThreads
    eps: float
    vectors: tuple[tuple[str, VectorParts], ...]
    widths: tuple[int, ...]
    sms: int
    shared: int

    @property
    def per_sm(self) -> int:
        """Return how many blocks an SM has at once: as many as registers and memory are for."""
        arrays = len(self.vectors) + 1 + len(self.widths)
        registers = OTHERS + OCTET * self.threads.passes * arrays
        by_registers = REGISTERS // (registers * self.threads.threads)
        return max(1, min(by_registers, self.shared // self._bytes, MOST_BLOCKS))

    @property
    def blocks(self) -> int:
        """Return how many blocks are launched at most: as many as a GPU has at once."""
        return self.sms * self.per_sm

    def fits(self) -> bool:
        """Say whether the kernel takes such rows."""
        return self.threads.fits() and self._bytes <= self.shared

    @property
    def _bytes(self) -> int:
        row = OCTET * self.threads.passes * self.threads.threads * sum(self.widths)
        return SHARED + STAGES * row
