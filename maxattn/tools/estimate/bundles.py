"""The final bundles of a TPU kernel as libtpu writes them: text in, values out.

A bundle is what a core issues in one cycle. libtpu writes one a line, and of some of them the
comments on the lines after it:

    0x1d   : > { %261 = sbr.rel (%p258_p11) target = $region36 }

Comments name where a region begins and ends, and which comparison ends a loop. What is of another
form is refused, since an estimate of it would be a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from maxattn.errors import Unsupported

UNDERSTOOD = "libtpu 0.0.42 to 0.0.50"
_HEAD = re.compile(r"\s*(0x[0-9a-f]+|0)\s+((?:[A-Z]{2}[ ,]*)*):")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGION = re.compile(r"\bregion (\d+)")
# A branch of another kind than those that are followed, and a wait of many cycles in one bundle.
_STRANGE = re.compile(r"\bsbr\.(?!rel (?:\(!?%\w+\) )?target = \$region)[\w.]*|\bvdelay[\w.]*")
_BRANCH = re.compile(r"\bsbr\.rel (?:\(!?%\w+\) )?target = \$region(\d+)")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder (%\w+), (\d+) /\* loop exit test")
_GRID = re.compile(r"iteration_bounds: \(([\d, ]*)\)")
NO_BOUND = 2**31 - 2  # steps, of a grid whose length is an argument of the kernel
PIPELINE = 2
"""Trips of a loop beside its steps: blocks are fetched a trip before, and written a trip after."""


def unknown(who: str, rule: str) -> Unsupported:
    """Return the refusal of a dump.

    Args:
        who: whose dump, such as "libtpu 0.0.60's dump of my_kernel".
        rule: what it lacks, or has beside what is known.
    """
    remedy = f"the dumps of {UNDERSTOOD} are understood: install one, or leave --estimate out"
    return Unsupported("estimate", who, rule, remedy)


class Bundle(NamedTuple):
    """Hold one bundle.

    Args:
        code: its instructions, without comments.
        text: both.
        starts_loop: whether a loop's body begins here.
    """

    code: str
    text: str
    starts_loop: bool


class Span(NamedTuple):
    """Hold the bundles from `start` to before `end` that a branch skips."""

    start: int
    end: int

    def holds(self, other: Span) -> bool:
        """Tell whether another span lies in this one, and is not the same."""
        return self != other and self.start <= other.start and other.end <= self.end


class Loop(NamedTuple):
    """Hold a loop.

    Args:
        start, end: its first bundle, and the one after the branch back.
        steps: how many steps of a grid it runs; None where only the device knows.
    """

    start: int
    end: int
    steps: int | None

    @property
    def span(self) -> Span:
        """Return its bundles."""
        return Span(self.start, self.end)


@dataclass(frozen=True)
class Bundles:
    """Hold a kernel's bundles and where they branch.

    Args:
        rows: in the order of their addresses.
        who: whose dump it is, for refusals.
    """

    rows: tuple[Bundle, ...]
    who: str

    @staticmethod
    def read(text: str, who: str) -> Bundles:
        """Read the text of a file `...-final_bundles.txt`.

        Raises:
            Unsupported: it has another form.
        """
        rows: list[tuple[str, str]] = []
        for line in text.splitlines():
            if (head := _HEAD.match(line)) and "{" in line:
                if int(head.group(1), 16) != len(rows):
                    raise unknown(who, f"bundle {len(rows)} has the address {head.group(1)}")
                rows.append((head.group(2), line[head.end() :]))
            elif rows:  # what stands before the first explains the marks
                rows[-1] = (rows[-1][0], f"{rows[-1][1]}\n{line}")
        if not rows:
            raise unknown(who, "it has no line such as '0x1d   : > { ... }'")
        found = Bundles(tuple(_bundle(*row) for row in rows), who)
        strange = {word for row in found.rows for word in _STRANGE.findall(row.code)}
        if strange:
            raise unknown(
                who, f"it has instructions that are not known: {', '.join(sorted(strange))}"
            )
        return found

    @cached_property
    def skips(self) -> tuple[Span, ...]:
        """What branches forward skip, in the order of the branches."""
        return tuple(Span(i + 1, to) for i, to in self._branches if to > i)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Every loop, in the order of their ends: inner ones before those around them.

        Raises:
            Unsupported: a loop begins and no branch leads back to it.
        """
        back = [Span(to, i + 1) for i, to in self._branches if to <= i]
        starts = {i for i, row in enumerate(self.rows) if row.starts_loop}
        if starts != {span.start for span in back}:
            raise unknown(self.who, "a loop begins where no branch leads back to")
        if any(one.start < s.start < one.end < s.end for s in self.skips for one in back):
            raise unknown(self.who, "a branch leads out of a loop")
        return tuple(self._loop(span, back) for span in back)

    @cached_property
    def _branches(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._find_branches())

    def _find_branches(self) -> Iterator[tuple[int, int]]:
        first: dict[str, int] = {}
        for i, row in enumerate(self.rows):
            for region in _REGION.findall(row.text):
                first.setdefault(region, i)
        for i, row in enumerate(self.rows):
            for region in _BRANCH.findall(row.code):
                yield i, first.get(region, len(self.rows))  # the end alone has no comment

    def _loop(self, span: Span, every: list[Span]) -> Loop:
        inner = [other for other in every if span.holds(other)]
        own = [
            row.text
            for i, row in enumerate(self.rows[span.start : span.end], start=span.start)
            if not any(other.start <= i < other.end for other in inner)
        ]
        return Loop(*span, self._steps("\n".join(own)))

    def _steps(self, text: str) -> int | None:
        """Return the bound of a loop's counter, less the trips that only fetch or write.

        Transfers compare their blocks with the grid, and must name as many steps.
        """
        tests, grids = set(_EXIT.findall(text)), {prod(_sides(g)) for g in _GRID.findall(text)}
        if not tests and all(grid > NO_BOUND for grid in grids):
            return None
        if len(tests) != 1:
            raise unknown(self.who, f"a loop has {len(tests)} exit tests")
        ((counter, bound),) = tests
        if not re.search(rf"{counter} = sadd\.s32 1, %", text):
            raise unknown(self.who, f"the loop counter {counter} does not go up by 1")
        steps = int(bound) - PIPELINE
        if steps < 1 or grids - {steps}:
            named = ", ".join(map(str, sorted(grids))) or "none"
            raise unknown(self.who, f"a loop has {steps} steps, and the grid of its blocks {named}")
        return steps


def _sides(text: str) -> list[int]:
    return [int(n) for n in text.replace(",", " ").split()]


def _bundle(marks: str, text: str) -> Bundle:
    return Bundle(_COMMENT.sub("", text), text, "LB" in marks)
