"""How many slots of each unit the bundles fill: libtpu's table, one row a bundle."""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.tools.estimate.bundles import unknown

FILLS, SPILLS = "VLOAD:FILL", "VSTORE:SPILL"
_CAPACITY, _USE = "== CAPACTIY:", "== UTILIZATION:"  # libtpu's own spelling


@dataclass(frozen=True)
class SlotTable:
    """Hold a table.

    Args:
        capacity: slots of each unit in a bundle.
        rows: how many of them each bundle fills, in the order of `capacity`.
    """

    capacity: dict[str, int]
    rows: tuple[tuple[int, ...], ...]

    @staticmethod
    def read(text: str, who: str) -> SlotTable:
        """Read the text of a file `...-final_hlo-static-per-bundle-utilization.txt`.

        Raises:
            Unsupported: it has another form.
        """
        lines = text.split("\n")
        if len(lines) < 4 or lines[0] != _CAPACITY or lines[3] != _USE:
            raise unknown(who, f"its table of slots does not begin with '{_CAPACITY}'")
        names, sizes = lines[1].split(", "), _numbers(lines[2])
        rows = tuple(_numbers(line) for line in lines[4:] if line.strip())
        if any(len(row) != len(names) for row in (sizes, *rows)) or not {FILLS, SPILLS} <= {*names}:
            raise unknown(who, "its table of slots has rows of another length than its heading")
        return SlotTable(dict(zip(names, sizes, strict=True)), rows)

    def used(self, chosen: list[int]) -> dict[str, int]:
        """Add up the slots that some bundles fill."""
        columns = zip(*(self.rows[i] for i in chosen), strict=True)
        return {name: sum(column) for name, column in zip(self.capacity, columns, strict=True)}


def _numbers(line: str) -> tuple[int, ...]:
    words = line.split()
    return tuple(int(word) for word in words) if all(map(str.isdecimal, words)) else ()
