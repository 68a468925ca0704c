"""What a schedule's products cost the matrix units, which its bundles do not show everywhere.

On v5e and v5p the compiler issues products faster than a matrix unit takes their rows. Bundles
alone would then give more than the peak.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from maxattn.devices import TensorCore
from maxattn.tools.estimate.bundles import Bundle, Bundles, unknown

ROWS = {"bf16": 16, "f32": 8}
"""Rows that one instruction sends through a unit, in units of bfloat16 rows' time."""
_PRODUCT = re.compile(r"\bvmatmul\.(?:mubr\.|msk\.|lmr\.)*(\w+)\.\S*?(mxu\d)\b")
_ANY = re.compile(r"\bvmatmul\b")


def products(row: Bundle, who: str) -> list[tuple[str, str]]:
    """List the products that a bundle issues, as (dtype, unit).

    Raises:
        Unsupported: one is of another form or dtype.
    """
    found = _PRODUCT.findall(row.code)
    strange = sorted({dtype for dtype, _ in found} - ROWS.keys())
    if strange or len(found) != len(_ANY.findall(row.code)):
        raise unknown(who, f"it has a product that is not known ({', '.join(strange) or row.code})")
    return found


def busy_cycles(bundles: Bundles, chosen: Sequence[int], core: TensorCore) -> float:
    """Return the cycles that some bundles keep every matrix unit busy, were they all equally so."""
    return sum(time for i in chosen for _, time in _times(bundles, i, core)) / core.units


def waits(bundles: Bundles, chosen: Sequence[int], core: TensorCore) -> float:
    """Return the cycles that bundles wait for matrix units, which take products in order.

    No product waits in a queue, so this is the slow end.
    """
    now, free = 0.0, dict[str, float]()
    for i in chosen:
        for unit, time in _times(bundles, i, core):
            start = max(now, free.get(unit, 0.0))
            free[unit], now = start + time, start
        now += 1
    return now - len(chosen)


def _times(bundles: Bundles, i: int, core: TensorCore) -> Iterator[tuple[str, float]]:
    for dtype, unit in products(bundles.rows[i], bundles.who):
        yield unit, ROWS[dtype] / core.rows
