"""The context strategies: how Q, K and V move between devices. One line each; a new strategy is one
new file.
"""

from __future__ import annotations

from maxattn.context_parallel.all_gather import AllGather, WholeKeys
from maxattn.context_parallel.base import Collective, Specs, Strategy
from maxattn.context_parallel.ring.ring import Ring
from maxattn.context_parallel.ulysses import Ulysses, UlyssesRing

STRATEGIES: dict[str, type] = {
    "none": WholeKeys,
    "all_gather": AllGather,
    "ring": Ring,
    "ulysses": Ulysses,
    "ulysses_ring": UlyssesRing,
}

__all__ = [
    "STRATEGIES",
    "AllGather",
    "Collective",
    "Ring",
    "Specs",
    "Strategy",
    "Ulysses",
    "UlyssesRing",
    "WholeKeys",
]
