"""The properties of a mask that kernels read, with defaults that are correct for every mask.

A mask class overrides a default so that kernels do less work. No kernel, chunk size or block size
depends on the class of a mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from maxattn.masks.base import Mask
    from maxattn.masks.row_runs import RowBlocks


class Band(NamedTuple):
    """Pairs with `query - left <= key <= query + right`; query 0 is at `offset`; None: no bound."""

    left: int | None = None
    right: int | None = None
    offset: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the band allows every pair."""
        return self.left is None and self.right is None


class ForKernels:
    """The properties of a mask that kernels read, with defaults correct for every mask."""

    def parts(self) -> tuple[Mask, ...]:
        """Return the masks that this mask directly joins or negates."""
        return ()

    @property
    def leaves_parts_empty(self) -> bool:
        """Whether skipping chunks saves work, because the mask forbids whole chunks of pairs."""
        return any(part.leaves_parts_empty for part in self.parts())

    @property
    def divides_positions(self) -> bool:
        """Whether the mask's test divides positions, which takes a kernel more registers."""
        return any(part.divides_positions for part in self.parts())

    @property
    def looked_up(self) -> int:
        """The number of table entries that the mask's test reads; a kernel reads each in turn."""
        return sum(part.looked_up for part in self.parts())

    @property
    def bounds_tiles(self) -> bool:
        """Whether the mask's arrays show which tiles are empty, so that kernels can skip them."""
        return any(part.bounds_tiles for part in self.parts())

    @property
    def is_key_padding(self) -> bool:
        """Whether the mask is a `KeyPadding`, which marks each batch row's padding by an array."""
        return False

    @property
    def is_of_keys(self) -> bool:
        """Whether the mask allows the same keys to every query and head of a batch row."""
        return self.is_key_padding

    def key_limit(self) -> Any:
        """Return n, an int or `[B]`, if the mask allows exactly the first n keys, else None."""
        return None

    def segment_ids(self) -> tuple[Any, Any] | None:
        """Return ids `[B, T]` and `[B, S]` that are equal for allowed pairs; None without ids."""
        return None

    @property
    def has_ids(self) -> bool:
        """Whether the mask or one of its parts compares segment ids."""
        return self.segment_ids() is not None or any(part.has_ids for part in self.parts())

    def band(self) -> Band | None:
        """Return the mask as a band along the diagonal, or None for other masks."""
        return None

    def most_keys(self) -> int | None:
        """Return an upper bound of the keys that a query sees, from numbers alone, or None."""
        return None

    def own_block(self) -> tuple[int, int] | None:
        """Return (queries, keys) of a block if equal blocks from token 0 on see only themselves."""
        return None

    def repeats(self, q: int, kv: int) -> bool:
        """Check whether moving the mask by `q` queries and `kv` keys surely leaves it equal."""
        return False

    def row_blocks(self) -> tuple[RowBlocks, ...] | None:
        """Return the query rows at which interval ends may jump; None if all query rows may."""
        parts = [part.row_blocks() for part in self.parts()]
        known = [blocks for blocks in parts if blocks is not None]
        return sum(known, ()) if parts and len(known) == len(parts) else None
