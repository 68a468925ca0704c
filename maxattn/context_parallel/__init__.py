"""The context strategies: how Q, K and V move between devices. `table.py` lists them.

Importing this package imports no strategy: the first use of `STRATEGIES["ring"]` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from maxattn.context_parallel.table import TABLE
from maxattn.kernels.table import Classes

if TYPE_CHECKING:
    from maxattn.context_parallel.base import Strategy

STRATEGIES: Mapping[str, type[Strategy]] = Classes(TABLE)
