"""The table of context strategies, which config and plan read without importing a strategy.

A new strategy is one file and one row here, or `add(StrategyRow(...))` from elsewhere. This module
imports no strategy and no jax.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.kernels.table import Table


@dataclass(frozen=True)
class StrategyRow:
    """A strategy's name, the place of its class, and the settings that it reads."""

    name: str  # the value of `context_parallel`
    where: str  # "module:Class", imported when the class is first used
    reads: tuple[str, ...] = ()  # settings that this strategy reads and some others do not
    # whether `attention` may have this name too, for this strategy and any kernel
    in_attention: bool = False

    @property
    def title(self) -> str:
        """The strategy's name in messages."""
        return self.name


_ULYSSES = "maxattn.context_parallel.ulysses"
_CHUNKS, _UNIFORM = "ulysses_attention_chunks", "attention_sharding_uniform"
_OF_ULYSSES_RING = ("ulysses_shards", _CHUNKS, "ring_direction")
_RING = "maxattn.context_parallel.ring.ring"
TABLE: Table[StrategyRow] = Table(
    "context strategy",
    (
        StrategyRow("none", "maxattn.context_parallel.all_gather:ReplicatedKeys"),
        StrategyRow("all_gather", "maxattn.context_parallel.all_gather:AllGather"),
        StrategyRow("ring", f"{_RING}:Ring", ("ring_direction",), True),
        StrategyRow("ulysses", f"{_ULYSSES}:Ulysses", (_CHUNKS, _UNIFORM), True),
        StrategyRow("ulysses_ring", f"{_ULYSSES}:UlyssesRing", _OF_ULYSSES_RING, True),
    ),
)
add, remove = TABLE.add, TABLE.remove


def in_attention() -> tuple[str, ...]:
    """Return the names of strategies that are values of `attention` too."""
    return tuple(row.name for row in TABLE.values() if row.in_attention)
