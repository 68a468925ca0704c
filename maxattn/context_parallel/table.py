"""One row a context strategy: what the config and the plan know of it before they import it.

A new strategy is one file and one row, which need not stand here: `add(StrategyRow(...))` adds one.
This module imports no strategy and no jax.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.kernels.table import Table


@dataclass(frozen=True)
class StrategyRow:
    """Say what a strategy is called and what it reads.

    Args:
        name: as `context_parallel:` spells it.
        where: "module:Class", imported when the class is first asked for.
        reads: the settings that change what it does and that not every strategy reads.
        in_attention: whether `attention:` takes its name too, for it with the best kernel inside.
    """

    name: str
    where: str
    reads: tuple[str, ...] = ()
    in_attention: bool = False

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.name


_ULYSSES = "maxattn.context_parallel.ulysses"
_CHUNKS, _SHARDS = "ulysses_attention_chunks", "ulysses_shards"
_DIRECTION = "ring_direction"
TABLE: Table[StrategyRow] = Table(
    "context strategy",
    (
        StrategyRow("none", "maxattn.context_parallel.all_gather:ReplicatedKeys"),
        StrategyRow("all_gather", "maxattn.context_parallel.all_gather:AllGather"),
        StrategyRow("ring", "maxattn.context_parallel.ring.ring:Ring", (_DIRECTION,), True),
        StrategyRow(
            "ulysses", f"{_ULYSSES}:Ulysses", (_CHUNKS, "attention_sharding_uniform"), True
        ),
        StrategyRow(
            "ulysses_ring", f"{_ULYSSES}:UlyssesRing", (_SHARDS, _CHUNKS, _DIRECTION), True
        ),
    ),
)
add, remove = TABLE.add, TABLE.remove


def in_attention() -> tuple[str, ...]:
    """Return the names of strategies that `attention:` takes."""
    return tuple(row.name for row in TABLE.values() if row.in_attention)
