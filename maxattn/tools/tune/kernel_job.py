"""One TPU kernel to compile, alone and over few tiles, as a value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from maxattn.block_sizes.estimated.step_cost import Evaluates, Kind, Tile
from maxattn.block_sizes.sizes import ITEMSIZE, KernelKind

ROWS, COLUMNS = 2, 4  # tiles of a head: a kernel has the same schedule over more
# The largest VMEM of a TPU: in it the compiler would keep a shorter operand, and the kernel
# would have no transfers.
OPERAND = 2**27
PADDED = 8  # keys of the last tile that are padding, where there are any


@dataclass(frozen=True)
class KernelJob:
    """Say which kernel.

    Args:
        device_kind: such as "TPU v6e".
        kernel: its name.
        kind: which of its kernels.
        tile: queries, keys, keys computed at once.
        head_dim, dtype: H, and the dtype of q, k and v.
        masked: what it evaluates of a mask; a bool says whether keys are padded.
    """

    device_kind: str
    kernel: KernelKind
    kind: Kind
    tile: Tile
    head_dim: int
    dtype: str
    masked: Evaluates

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of the call that is compiled."""
        rows, columns = (COLUMNS, ROWS) if self.by_key else (ROWS, COLUMNS)
        return rows * self.tile[0], columns * self.tile[1] - self._padding

    @property
    def _padding(self) -> int:
        return PADDED if self.masked == Evaluates.PADDING else 0

    @property
    def window(self) -> tuple[int, int, int]:
        """Tokens before and after a query that it sees, and the position of the first query.

        Of an interval of keys. The last row of tiles has all columns, and the first one fewer.
        """
        q, kv = self.tile[:2]
        longest = sum(self.lengths)
        if self.by_key:
            before = (COLUMNS - 1) * q - kv
            return max(0, before), longest, max(0, -before)
        after = (COLUMNS - 1) * kv - q
        return longest, max(0, after), min(0, after)

    @property
    def by_key(self) -> bool:
        """Whether its grid goes through the queries of each tile of keys."""
        return self.kind in ("dkv", "fused")

    @property
    def batch(self) -> int:
        """Rows of the batch: the backward's cores share them."""
        return 1 if self.kind == "fwd" else 2

    @property
    def heads(self) -> int:
        """Heads of a row: an even number of them, so many that every operand lies in HBM."""
        shortest = min(self.lengths) * self.head_dim * ITEMSIZE[self.dtype] * self.batch
        return 2 * -(-OPERAND // (2 * shortest))

    @property
    def steps(self) -> int:
        """Steps of its grid."""
        return self.batch * self.heads * ROWS * COLUMNS

    def values(self) -> dict[str, Any]:
        """Return its fields as JSON has them."""
        return asdict(self) | {"tile": list(self.tile)}

    @staticmethod
    def of(values: dict[str, Any]) -> KernelJob:
        """Read what `values` wrote."""
        fields = values | {"tile": tuple(values["tile"]), "masked": Evaluates(values["masked"])}
        return KernelJob(**fields)
