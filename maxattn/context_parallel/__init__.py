"""The context strategies: how Q, K and V move between devices. `table.py` lists them.

Importing this package imports no strategy: the first use of `STRATEGIES["ring"]` or of
`maxattn.context_parallel.Ring` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from maxattn.context_parallel.table import TABLE
from maxattn.kernels.table import Classes

if TYPE_CHECKING:
    from maxattn.context_parallel.all_gather import AllGather, ReplicatedKeys
    from maxattn.context_parallel.base import Collective, OperandSpecs, Strategy
    from maxattn.context_parallel.ring.ring import Ring
    from maxattn.context_parallel.ulysses import Ulysses, UlyssesRing

STRATEGIES: Mapping[str, type[Strategy]] = Classes(TABLE)

__all__ = [
    "STRATEGIES",
    "AllGather",
    "Collective",
    "OperandSpecs",
    "ReplicatedKeys",
    "Ring",
    "Strategy",
    "Ulysses",
    "UlyssesRing",
]


def __getattr__(name: str) -> Any:
    if name in ("Collective", "OperandSpecs", "Strategy"):
        from maxattn.context_parallel import base

        return getattr(base, name)
    found = [row.name for row in TABLE.values() if row.where.endswith(f":{name}")]
    if not found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return STRATEGIES[found[0]]
