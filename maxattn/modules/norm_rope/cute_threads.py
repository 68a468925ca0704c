"""How the CuTe kernels of norm and rotary embedding share a row among the threads of a block."""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.modules.norm_rope.row import NormRopeRow

WARP = 32
PAIRS = 4  # of the rotary embedding, that a thread loads together: 8 channels
MOST_THREADS = 256  # of a block, so that an SM holds several, where the row lets it
LARGEST_BLOCK = 512  # threads; a larger one leaves each fewer registers than four passes need
MOST_PASSES = 4  # beyond, registers run out: 8 channels each, and their sums


@dataclass(frozen=True)
class CuteThreads(NormRopeRow):
    """Say which thread takes which channels of a row.

    A head is shared by `lanes` neighbouring threads, each with 8 of its channels: 8 neighbours, or
    4 of each half where the pairs of the rotary embedding are halves apart. A block takes `slots`
    heads at a time, and all N in `passes` passes. Threads that are left over repeat what the last
    head or the last lane does, and store the same; sums leave them out.

    >>> CuteThreads(12, 128, "across", 1e-6, "interleaved").threads
    96
    """

    @staticmethod
    def of(row: NormRopeRow) -> CuteThreads:
        """Return how a row is shared."""
        return CuteThreads(row.heads, row.head_dim, row.norm, row.eps, row.style)

    @property
    def used_lanes(self) -> int:
        """Return how many threads a head needs."""
        return self.head_dim // (2 * PAIRS)

    @property
    def lanes(self) -> int:
        """Return how many threads a head has: a power of two, so that shuffles sum over it."""
        return 1 << (self.used_lanes - 1).bit_length()

    @property
    def slots(self) -> int:
        """Return how many heads a block takes at a time: whole warps."""
        wanted = max(2, -(-self.heads * self.lanes // MOST_THREADS))
        need, of_warp = -(-self.heads // min(MOST_PASSES, wanted)), max(1, WARP // self.lanes)
        return -(-need // of_warp) * of_warp

    @property
    def passes(self) -> int:
        """Return in how many passes a block takes a row: two, or as many as keep it small."""
        return -(-self.heads // self.slots)

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return self.lanes * self.slots

    @property
    def warps(self) -> int:
        """Return the warps of a block."""
        return self.threads // WARP

    def fits(self) -> bool:
        """Say whether a block can share such a row."""
        even = self.head_dim % (2 * PAIRS) == 0
        return even and self.lanes <= WARP and self.threads <= LARGEST_BLOCK
