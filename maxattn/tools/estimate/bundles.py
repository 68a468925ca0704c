"""Read libtpu's dumps of a TPU kernel: bundles, slots, operands, products.

A bundle is the set of instructions that a core issues in one cycle. libtpu writes each bundle on a
line, and may write comments on the bundle on the next lines:

    0x1d   : > { %261 = sbr.rel (%p258_p11) target = $region36 }

Comments mark where a region begins and ends, and which comparison ends a loop. Unknown branches,
waits and products are refused, since their time would be a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from maxattn.devices import TensorCore
from maxattn.errors import Unsupported
from maxattn.jax_private.versions import LIBTPU
from maxattn.tools.compile.hlo import bytes_of

_HEAD = re.compile(r"\s*(0x[0-9a-f]+|0)\s+((?:[A-Z]{2}[ ,]*)*):")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGION = re.compile(r"\bregion (\d+)")
# Refused: a branch that `_branches` cannot read, or one bundle's wait of many cycles.
_STRANGE = re.compile(r"\bsbr\.(?!rel (?:\(!?%\w+\) )?target = \$region)[\w.]*|\bvdelay[\w.]*")
_BRANCH = re.compile(r"\bsbr\.rel (?:\(!?%\w+\) )?target = \$region(\d+)")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder (%\w+), (\d+) /\* loop exit test")
_GRID = re.compile(r"iteration_bounds: \(([\d, ]*)\)")
NO_BOUND = 2**31 - 2  # more steps stand for a grid whose length is an argument of the kernel
PIPELINE = 2  # loop trips before and after the steps, which only fetch or write blocks


def unknown(who: str, rule: str) -> Unsupported:
    """Return the error for an unreadable dump; `who` is like "libtpu 0.0.60's dump of k"."""
    remedy = f"install libtpu{LIBTPU}, whose dumps are supported, or leave --estimate out"
    return Unsupported("estimate", who, rule, remedy)


class Bundle(NamedTuple):
    """A bundle's instructions without (`code`) and with comments (`text`)."""

    code: str
    text: str
    starts_loop: bool


class Span(NamedTuple):
    """The bundles from `start` up to, but not including, `end`."""

    start: int
    end: int

    def holds(self, other: Span) -> bool:
        """Check whether this span strictly contains another one."""
        return self != other and self.start <= other.start and other.end <= self.end


class Loop(NamedTuple):
    """A loop's bundles, and its number of grid steps (None: known only at run time)."""

    span: Span
    steps: int | None


@dataclass(frozen=True)
class Bundles:
    """A kernel's bundles in the order of their addresses, and the name of the dump."""

    rows: tuple[Bundle, ...]
    who: str

    @staticmethod
    def read(text: str, who: str) -> Bundles:
        """Parse the text of a file `...-final_bundles.txt`."""
        rows: list[tuple[str, str]] = []
        for line in text.splitlines():
            if (head := _HEAD.match(line)) and "{" in line:
                if int(head.group(1), 16) != len(rows):
                    raise unknown(who, f"bundle {len(rows)} has the wrong address {head.group(1)}")
                rows.append((head.group(2), line[head.end() :]))
            elif rows:  # text before the first bundle explains the marks
                rows[-1] = (rows[-1][0], f"{rows[-1][1]}\n{line}")
        if not rows:
            raise unknown(who, "it has no line such as '0x1d   : > { ... }'")
        made = (Bundle(_COMMENT.sub("", text), text, "LB" in marks) for marks, text in rows)
        found = Bundles(tuple(made), who)
        if strange := {word for row in found.rows for word in _STRANGE.findall(row.code)}:
            listed = ", ".join(sorted(strange))
            raise unknown(who, f"it has unknown instructions: {listed}")
        return found

    @cached_property
    def skips(self) -> tuple[Span, ...]:
        """The spans that forward branches skip, in the order of the branches."""
        return tuple(Span(i + 1, to) for i, to in self._branches if to > i)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops in the order of their ends, so that inner loops come before outer ones."""
        back = [Span(to, i + 1) for i, to in self._branches if to <= i]
        starts = {i for i, row in enumerate(self.rows) if row.starts_loop}
        if starts != {span.start for span in back}:
            raise unknown(self.who, "its marks of loops do not match the branches that lead back")
        if any(one.start < s.start < one.end < s.end for s in self.skips for one in back):
            raise unknown(self.who, "a branch leads out of a loop")
        return tuple(Loop(span, self._steps(span, back)) for span in back)

    @cached_property
    def _branches(self) -> tuple[tuple[int, int], ...]:
        """Every branch as (bundle, target bundle); a target without a comment is the end."""
        first: dict[str, int] = {}
        for i, row in enumerate(self.rows):
            for region in _REGION.findall(row.text):
                first.setdefault(region, i)
        return tuple(
            (i, first.get(region, len(self.rows)))
            for i, row in enumerate(self.rows)
            for region in _BRANCH.findall(row.code)
        )

    def _steps(self, span: Span, every: list[Span]) -> int | None:
        """Return a loop's grid steps, without trips that only move data; None: unknown."""
        inner = [other for other in every if span.holds(other)]
        own = (i for i in range(*span) if not any(s.start <= i < s.end for s in inner))
        text = "\n".join(self.rows[i].text for i in own)
        tests, grids = set(_EXIT.findall(text)), {prod(sides(g)) for g in _GRID.findall(text)}
        if not tests and all(grid > NO_BOUND for grid in grids):
            return None
        if len(tests) != 1:
            raise unknown(self.who, f"a loop has {len(tests)} exit tests, and must have one")
        ((counter, bound),) = tests
        if not re.search(rf"{counter} = sadd\.s32 1, %", text):
            raise unknown(self.who, f"the loop counter {counter} does not go up by 1")
        steps = int(bound) - PIPELINE
        if steps < 1 or grids - {steps}:
            named = ", ".join(map(str, sorted(grids))) or "none"
            raise unknown(self.who, f"a loop has {steps} steps, and its blocks' grid {named}")
        return steps


def sides(text: str) -> list[int]:
    """Parse numbers separated by commas or blanks."""
    return [int(n) for n in text.replace(",", " ").split()]


# ---- slots: how many of each unit the bundles fill -----------------------------------------------

FILLS, SPILLS = "VLOAD:FILL", "VSTORE:SPILL"
_CAPACITY, _USE = "== CAPACTIY:", "== UTILIZATION:"  # libtpu's spelling


@dataclass(frozen=True)
class SlotTable:
    """Slots by unit: how many a bundle has, and in `rows` how many each bundle fills."""

    capacity: dict[str, int]
    rows: tuple[tuple[int, ...], ...]

    @staticmethod
    def read(text: str, who: str) -> SlotTable:
        """Parse the text of a file `...-final_hlo-static-per-bundle-utilization.txt`."""

        def numbers(line: str) -> tuple[int, ...]:
            words = line.split()
            return tuple(map(int, words)) if all(map(str.isdecimal, words)) else ()

        lines = text.split("\n")
        if len(lines) < 4 or lines[0] != _CAPACITY or lines[3] != _USE:
            raise unknown(who, f"its table of slots does not begin with '{_CAPACITY}'")
        names, sizes = lines[1].split(", "), numbers(lines[2])
        rows = tuple(numbers(line) for line in lines[4:] if line.strip())
        if any(len(row) != len(names) for row in (sizes, *rows)) or not {FILLS, SPILLS} <= {*names}:
            raise unknown(who, "its table of slots has rows of another length than its heading")
        return SlotTable(dict(zip(names, sizes, strict=True)), rows)

    def used(self, chosen: list[int]) -> dict[str, int]:
        """Sum the filled slots of the chosen bundles."""
        columns = zip(*(self.rows[i] for i in chosen), strict=True)
        return {name: sum(column) for name, column in zip(self.capacity, columns, strict=True)}


# ---- operands: the blocks that a kernel's steps read and write, from its first bundle ------------

_WINDOW = re.compile(
    r"inlined_call_operand\.([\w<> ]+?) \[[^\]]*\][^\]]*\]\s*/\* (input|output) window allocation"
    r" for operator (?:input|output) (\d+)\. The window shape is (\w+)\[([\d,]*)\], while the full"
    r" shape is \w+\[([\d,]*)\]"
)
# A DMA that the kernel itself issues is unconditional; window DMAs have a condition.
_WRITE = re.compile(
    r"dma\.vmem_to_hbm \[thread:\$?\d+\]\s+/\*vmem=\*/[^,]*, /\*size_in_granules=\*/(\d+)"
)
GRANULE = 32  # bytes


class Window(NamedTuple):
    """One operand: whether it is in HBM, the bytes of a block, the number of blocks, and the sides
    of a block and of the operand.
    """

    in_hbm: bool
    is_output: bool
    size: int
    blocks: int
    block: tuple[int, ...]
    whole: tuple[int, ...]


def windows_of(bundles: Bundles) -> tuple[Window, ...]:
    """Return the operands that a kernel reads or writes in blocks: inputs, then outputs."""
    found = []
    rows = _WINDOW.findall(bundles.rows[0].text)
    for memory, kind, _, item, block, whole in sorted(rows, key=lambda row: (row[1], int(row[2]))):
        parts, every = tuple(sides(block)), tuple(sides(whole))
        blocks = prod(-(-n // part) for n, part in zip(every, parts, strict=True))
        size = bytes_of(f"{item}[{block}]")
        found.append(Window(memory == "hbm", kind == "output", size, blocks, parts, every))
    if not any(window.is_output for window in found):
        raise unknown(bundles.who, "its first bundle names no block of an output")
    return tuple(found)


def moved_by_itself(bundles: Bundles, rows: Iterable[int]) -> int:
    """Count the bytes of a kernel's own DMAs, twice: each adds to a sum that it has read."""
    found = (size for i in rows for size in _WRITE.findall(bundles.rows[i].text))
    return 2 * GRANULE * sum(map(int, found))


# ---- products: the time of the matrix units ------------------------------------------------------
# On v5e and v5p the compiler issues products faster than a matrix unit accepts rows, so a count of
# bundles alone would let a kernel exceed the peak.

ROWS = {"bf16": 16, "f32": 8}  # rows that an instruction sends, in units of a bfloat16 row's time
_PRODUCT = re.compile(r"\bvmatmul\.(?:mubr\.|msk\.|lmr\.)*(\w+)\.\S*?(mxu\d)\b")
_ANY = re.compile(r"\bvmatmul\b")


def products(row: Bundle, who: str) -> list[tuple[str, str]]:
    """List a bundle's matrix products as (dtype, matrix unit)."""
    found = _PRODUCT.findall(row.code)
    strange = sorted({dtype for dtype, _ in found} - ROWS.keys())
    if strange or len(found) != len(_ANY.findall(row.code)):
        raise unknown(who, f"it has an unknown product ({', '.join(strange) or row.code})")
    return found


def busy_cycles(bundles: Bundles, chosen: Sequence[int], core: TensorCore) -> float:
    """Return the mean cycles that the chosen bundles keep a matrix unit busy."""
    return sum(time for i in chosen for _, time in _times(bundles, i, core)) / core.units


def waits(bundles: Bundles, chosen: Sequence[int], core: TensorCore) -> float:
    """Return an upper bound of the cycles that bundles wait for matrix units: no product queues."""
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
