"""How many blocks the CuTe kernels of norm and rotary launch, and what they hold where."""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.modules.norm_rope.cute_threads import PAIRS, CuteThreads

# Bytes of rows that an SM asks for ahead, forward and backward: about so many measured best on an
# H200, for rows of 1,280 to 5,120 channels.
AHEAD = {1: 26_000, 2: 42_000}
STAGES = {1: 2, 2: 3}  # rows that a block has in shared memory, forward and backward
OF_A_BLOCK = 2048  # bytes of shared memory besides: the system's, and sums over warps
MOST_THREADS = 800  # of the blocks of an SM: each then has 80 registers or more
MOST_BLOCKS = 32  # of an SM
FLOAT32 = 4  # bytes of its numbers, the widest that the kernels take


@dataclass(frozen=True)
class CuteLaunch:
    """Say how rows are shared among blocks.

    Args:
        threads: that share a row.
        arrays: of rows that are read: 1 forward, x, and 2 backward, dy and x.
        width: bytes of one of their numbers.
        vectors: bytes of bias and scale.
        sms: streaming multiprocessors (SMs) of the GPU.
        shared: bytes of shared memory that one of them gives.
    """

    threads: CuteThreads
    arrays: int
    width: int
    vectors: int
    sms: int
    shared: int

    @property
    def stages(self) -> int:
        """Return how many rows a block has in shared memory: one is computed, others arrive."""
        most = STAGES[self.arrays]
        return next((n for n in range(most, 2, -1) if self._bytes(n) <= self.shared), 2)

    @property
    def holds_vectors(self) -> bool:
        """Say whether bias and scale stay with the block: in registers forward, or shared memory.

        Else each row reads them anew.
        """
        return self.arrays == 1 or self._bytes(self.stages) + self.vectors <= self.shared

    @property
    def per_sm(self) -> int:
        """Return how many blocks an SM has at once."""
        ahead = (self.stages - 1) * self._row
        wanted = max(1, round(AHEAD[self.arrays] / ahead))
        room = min(MOST_THREADS // self.threads.threads, self.shared // self._block)
        return max(1, min(wanted, room, MOST_BLOCKS))

    @property
    def blocks(self) -> int:
        """Return how many blocks are launched at most: as many as a GPU has at once."""
        return self.sms * self.per_sm

    def fits(self) -> bool:
        """Say whether the kernels take such rows."""
        return self.threads.fits() and self._bytes(2) <= self.shared

    @property
    def _row(self) -> int:
        """Return the bytes that are read of a row, and of its angles."""
        row = self.threads
        angles = 0 if row.style is None else 4 * row.head_dim
        return self.arrays * row.heads * row.head_dim * self.width + angles

    @property
    def _block(self) -> int:
        held = self.vectors if self.arrays == 2 and self.holds_vectors else 0
        return self._bytes(self.stages) + held

    def _bytes(self, stages: int) -> int:
        """Return the bytes of a block with so many rows: each thread has its own angles."""
        threads = self.threads
        channels = 2 * PAIRS * threads.passes * self.arrays * self.width
        angles = 0 if threads.style is None else 2 * 4 * PAIRS
        return OF_A_BLOCK + stages * threads.threads * (channels + angles + 4)


def fits(threads: CuteThreads, shared: int) -> bool:
    """Say whether the kernels take such rows of any dtype, forward and backward.

    Args:
        threads: that share a row.
        shared: bytes of shared memory that an SM gives.
    """
    vectors = 2 * FLOAT32 * threads.heads * threads.head_dim
    both = (CuteLaunch(threads, arrays, FLOAT32, vectors, 1, shared) for arrays in (1, 2))
    return all(launch.fits() for launch in both)
