"""The table at the end of a run: cases by category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tests.fuzz.case import Outcome

COLUMNS = ("cases", "right", "refused", "known", "failed", "seconds")


def table(outcomes: Iterable[Outcome]) -> str:
    """Write a line for each category, and one for all."""
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        row = rows.setdefault(outcome.name.partition(":")[0], Counter())
        row.update({"cases": 1, outcome.kind: 1, f"known {outcome.letter}": bool(outcome.letter)})
        row["seconds"] += round(outcome.seconds * 1000)
    rows["all"] = sum(rows.values(), Counter())
    head = f"{'category':<12}" + "".join(f"{name:>9}" for name in COLUMNS)
    return "\n".join([head, *(_line(name, row) for name, row in rows.items())])


def _line(name: str, row: Mapping[str, int]) -> str:
    cells = [f"{row['seconds'] / 1000:.1f}" if c == "seconds" else row[c] for c in COLUMNS]
    letters = sorted(
        key.split()[1] for key, n in row.items() if key.startswith("known ") and n and key[6:]
    )
    known = "  known: " + " ".join(f"{x}={row[f'known {x}']}" for x in letters) if letters else ""
    return f"{name:<12}" + "".join(f"{cell:>9}" for cell in cells) + known
