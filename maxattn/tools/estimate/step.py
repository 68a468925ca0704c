"""The cost of one step of a kernel's grid: which bundles run, and how often.

A step that visits its tile runs a body (the bundles with matmuls); another step skips it. Of two
bodies, the one with more matmuls is for tiles without a mask, or with as many the shorter. A span
without matmuls that steps can skip begins or ends a tile row, and runs once in each tile row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from maxattn.devices import TensorCore
from maxattn.tools.estimate.bundles import (
    Bundles,
    Loop,
    SlotTable,
    Span,
    busy_cycles,
    products,
    unknown,
    waits,
)

OF_MXU = "MATMUL", "MATPUSH"  # libtpu 0.0.52's slots of the matrix units, counted as MXU
BODIES = 2  # most bodies: for tiles without a mask, and for masked tiles
BodyCost = tuple[float, float, float]  # bundles, waits and busy cycles of a step with a body


class BodyShares(NamedTuple):
    """Shares of steps that compute a tile without and with the mask; steps in a tile row."""

    full: float
    masked: float
    row: float


@dataclass(frozen=True)
class GridStep:
    """The loop over a kernel's grid.

    The program has `forms` variants of its bodies, one after the other, for different operands.
    By default the first form is priced. If `recomputes`, every step computes its tile, and a body
    computes the tile again for unusual operands: this is the second form.
    """

    bundles: Bundles
    slots: SlotTable
    core: TensorCore
    forms: int = 1
    recomputes: bool = False

    @cached_property
    def loop(self) -> Loop:
        """The loop over the grid; the whole kernel if its grid has a single step."""
        if not self.bundles.loops:
            return Loop(Span(0, len(self.bundles.rows)), 1)
        if len(self.bundles.loops) != 1:
            rule = f"it has {len(self.bundles.loops)} loops, and one (over the grid) is supported"
            raise unknown(self.bundles.who, rule)
        return self.bundles.loops[0]

    @cached_property
    def _skipped(self) -> tuple[Span, ...]:
        """The innermost spans that a step can skip."""
        inside = [s for s in self.bundles.skips if self.loop.span.holds(s)]
        return tuple(s for s in inside if not any(s.holds(other) for other in inside))

    @cached_property
    def _every_body(self) -> tuple[Span, ...]:
        found = tuple(s for s in self._skipped if self._count(range(*s)))
        if len(found) > BODIES * self.forms or len(found) % self.forms:
            known = " or ".join(str(n * self.forms) for n in range(1, BODIES + 1))
            rule = f"a step chooses among {len(found)} bodies, and {known} are supported"
            raise unknown(self.bundles.who, rule)
        return found

    @property
    def bodies(self) -> tuple[Span, ...]:
        """The bodies of the first form."""
        return self.bodies_of(0)

    def bodies_of(self, form: int) -> tuple[Span, ...]:
        """Return the bodies of a form, the one for tiles without a mask first."""
        if self.recomputes:
            return self._every_body if form else ()
        count = len(self._every_body) // self.forms
        found = self._every_body[form * count : (form + 1) * count]
        return tuple(sorted(found, key=lambda s: (-self._count(range(*s)), s.end - s.start)))

    @cached_property
    def edges(self) -> int:
        """The number of bundles that begin and end a tile row."""
        return sum(s.end - s.start for s in self._skipped if s not in self._every_body)

    @cached_property
    def always(self) -> list[int]:
        """The addresses of the bundles that every step runs."""
        skipped = {i for s in self._skipped for i in range(*s)}
        return [i for i in range(*self.loop.span) if i not in skipped]

    @property
    def longest(self) -> int:
        """The number of bundles of a step that runs the longest body, and begins and ends a row."""
        bodies = (body.end - body.start for body in self._every_body)
        return len(self.always) + self.edges + max(bodies, default=0)

    def costs(self, form: int = 0) -> tuple[BodyCost, BodyCost]:
        """Price a form's bodies for tiles without and with a mask; a single body is for both."""
        bodies = self.bodies_of(form) or (Span(0, 0),)
        full, masked = (self._cost(bodies[place]) for place in (0, -1))
        return full, masked

    def _cost(self, body: Span) -> BodyCost:
        path = sorted((*self.always, *range(*body)))
        times = waits(self.bundles, path, self.core), busy_cycles(self.bundles, path, self.core)
        return body.end - body.start, *times

    def use(self, shares: BodyShares) -> dict[str, float]:
        """Return by unit the share of slots that the part of a step with the matmuls fills."""
        rows = self._products_part(shares)
        used = self.slots.used(rows)
        units = {name: n for name, n in self.slots.capacity.items() if name not in OF_MXU}
        filled = {name: used[name] / n / len(rows) for name, n in units.items()}
        return filled | {"MXU": busy_cycles(self.bundles, rows, self.core) / len(rows)}

    def used(self, shares: BodyShares) -> dict[str, int]:
        """Return by unit the number of slots that the part of a step with the matmuls fills."""
        return self.slots.used(self._products_part(shares))

    def _products_part(self, shares: BodyShares) -> list[int]:
        """Return the body that most steps run; without bodies, the span with most matmuls."""
        if self.bodies:
            is_masked = len(self.bodies) > 1 and shares.masked > shares.full
            return list(range(*self.bodies[-1 if is_masked else 0]))
        stretches: list[list[int]] = []
        for i in self.always:
            if stretches and stretches[-1][-1] == i - 1:
                stretches[-1].append(i)
            else:
                stretches.append([i])
        return max(stretches, key=self._count)

    def _count(self, rows: Sequence[int]) -> int:
        return sum(len(products(self.bundles.rows[i], self.bundles.who)) for i in rows)
