"""The blocks of its operands that a kernel's steps read and write, from its first bundle."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from maxattn.tools.compile.hlo_groups import bytes_of
from maxattn.tools.estimate.bundles import Bundles, unknown

_WINDOW = re.compile(
    r"inlined_call_operand\.([\w<> ]+?) \[[^\]]*\][^\]]*\]\s*/\* (input|output) window allocation"
    r" for operator (?:input|output) (\d+)\. The window shape is (\w+)\[([\d,]*)\], while the full"
    r" shape is \w+\[([\d,]*)\]"
)

# A write of the kernel's own stands without a condition; those of its windows have one.
_WRITE = re.compile(
    r"dma\.vmem_to_hbm \[thread:\$?\d+\]\s+/\*vmem=\*/[^,]*, /\*size_in_granules=\*/(\d+)"
)
GRANULE = 32  # bytes


class Window(NamedTuple):
    """Hold one operand.

    Args:
        memory: where the whole of it lies: "hbm" or "vmem".
        is_output: whether the kernel writes it.
        size: bytes of a block.
        blocks: how many blocks it has.
    """

    memory: str
    is_output: bool
    size: int
    blocks: int

    @property
    def in_hbm(self) -> bool:
        """Whether its blocks come from HBM, or go there."""
        return self.memory == "hbm"


def windows_of(bundles: Bundles) -> tuple[Window, ...]:
    """Return the operands that a kernel takes in blocks: inputs in order, then outputs.

    Raises:
        Unsupported: none is found.
    """
    found = _WINDOW.findall(bundles.rows[0].text)
    outputs = [row for row in found if row[1] == "output"]
    if not outputs:
        raise unknown(bundles.who, "its first bundle names no block of an output")
    order = sorted(found, key=lambda row: (row[1], int(row[2])))
    return tuple(_window(*row) for row in order)


def moved_by_itself(bundles: Bundles, rows: Iterable[int]) -> int:
    """Count the bytes that a kernel moves between HBM and VMEM by itself, beside its windows.

    What it writes so are sums, whose blocks it has read before.
    """
    found = (size for i in rows for size in _WRITE.findall(bundles.rows[i].text))
    return 2 * GRANULE * sum(map(int, found))


def _window(memory: str, kind: str, _: str, item: str, block: str, whole: str) -> Window:
    sizes = zip(_sides(whole), _sides(block), strict=True)
    blocks = prod(-(-side // part) for side, part in sizes)
    return Window(memory, kind == "output", bytes_of(f"{item}[{block}]"), blocks)


def _sides(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
