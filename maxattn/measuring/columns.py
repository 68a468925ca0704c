"""Format tables as text with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def columns(lines: Sequence[Sequence[object]], words: int = 0) -> list[str]:
    """Return a table's lines: the first `words` columns left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
