"""Questions of kernels, each with an answer that is right for every mask.

A kind that overrides an answer is computed with less work. No kernel, chunk size or block size
depends on the class of a mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from maxattn.masks.base import Mask
    from maxattn.masks.row_runs import RowBlocks


class Band(NamedTuple):
    """Pairs with `query - left <= key <= query + right`, query 0 at `offset`; None is no bound."""

    left: int | None = None
    right: int | None = None
    offset: int = 0

    @property
    def is_full(self) -> bool:
        """Whether every pair is allowed."""
        return self.left is None and self.right is None


class ForKernels:
    """The answers that are right for every mask."""

    def parts(self) -> tuple[Mask, ...]:
        """List the masks that this one is directly built of."""
        return ()

    @property
    def leaves_parts_empty(self) -> bool:
        """Whether skipping chunks saves work, since it forbids whole stretches of pairs."""
        return any(part.leaves_parts_empty for part in self.parts())

    @property
    def divides_positions(self) -> bool:
        """Whether its test divides positions, which takes more registers inside a kernel."""
        return any(part.divides_positions for part in self.parts())

    @property
    def looked_up(self) -> int:
        """How many numbers its test looks up, which a kernel does one by one."""
        return sum(part.looked_up for part in self.parts())

    @property
    def bounds_tiles(self) -> bool:
        """Whether its arrays show which tiles are empty, so that these can be skipped."""
        return any(part.bounds_tiles for part in self.parts())

    @property
    def is_key_padding(self) -> bool:
        """Whether it marks the padding of each batch row by an array."""
        return False

    @property
    def is_of_keys(self) -> bool:
        """Whether it allows the same keys to every query of every head."""
        return self.is_key_padding

    def key_limit(self) -> Any:
        """Return how many first keys it allows, an int or `[B]`; None for other masks."""
        return None

    def segment_ids(self) -> tuple[Any, Any] | None:
        """Return ids `[B, T]` and `[B, S]` that are equal for the pairs that attend, or None."""
        return None

    @property
    def has_ids(self) -> bool:
        """Whether any of its masks compares pairs by ids."""
        return self.segment_ids() is not None or any(part.has_ids for part in self.parts())

    def band(self) -> Band | None:
        """Return the mask as a band along the diagonal, or None for other masks."""
        return None

    def most_keys(self) -> int | None:
        """Bound how many keys a query sees, from the mask's numbers alone; None is no bound."""
        return None

    def own_block(self) -> tuple[int, int] | None:
        """Return queries and keys of equal blocks that see only themselves, from token 0 on."""
        return None

    def repeats(self, q: int, kv: int) -> bool:
        """Check whether a pair is allowed if the one `q` queries and `kv` keys further on is."""
        return False

    def row_blocks(self) -> tuple[RowBlocks, ...] | None:
        """Return where ends of intervals jump, so that few query rows are visited; None: all."""
        parts = [part.row_blocks() for part in self.parts()]
        known = [blocks for blocks in parts if blocks is not None]
        return sum(known, ()) if parts and len(known) == len(parts) else None
