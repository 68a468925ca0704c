"""What one step of a kernel's grid costs: which of its bundles run how often.

A step runs a body of products where a tile is visited, and skips it elsewhere. Of two bodies the
shorter is for tiles without a mask. What is skipped and has no products begins or ends a row of
tiles, and runs once a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from maxattn.devices import TensorCore
from maxattn.tools.estimate.bundles import Bundles, Loop, Span, unknown
from maxattn.tools.estimate.matrix_unit import busy_cycles, products, waits
from maxattn.tools.estimate.slots import SlotTable

BODIES = 2  # at most: of tiles without a mask, and of those with one


class BodyShares(NamedTuple):
    """Hold of which steps run a body.

    Args:
        full, masked: the share of steps whose tile is computed without and with the mask.
        row: how many steps a row of tiles has.
    """

    full: float
    masked: float
    row: float


class Cycles(NamedTuple):
    """Hold what a step costs.

    Args:
        fast: its bundles, or what keeps the matrix units busy where that is longer.
        slow: its bundles, and the waits of products that no unit queues.
    """

    fast: float
    slow: float


@dataclass(frozen=True)
class GridStep:
    """Hold the loop over a kernel's grid.

    Args:
        bundles, slots: of the kernel.
        core: what its products are priced with.
        forms: how many forms its bodies have, one after the other in the program. The first is
            priced; others are of operands that the estimate is not for.
    """

    bundles: Bundles
    slots: SlotTable
    core: TensorCore
    forms: int = 1

    @cached_property
    def loop(self) -> Loop:
        """The loop over the grid; all of the kernel where its grid has a single step.

        Raises:
            Unsupported: the kernel has several, or one inside it.
        """
        if not self.bundles.loops:
            return Loop(0, len(self.bundles.rows), 1)
        if len(self.bundles.loops) != 1:
            rule = f"it has {len(self.bundles.loops)} loops, and one over the grid is understood"
            raise unknown(self.bundles.who, rule)
        return self.bundles.loops[0]

    @cached_property
    def _skipped(self) -> tuple[Span, ...]:
        """What is skipped in a step and holds no other such span."""
        inside = [s for s in self.bundles.skips if self.loop.span.holds(s)]
        return tuple(s for s in inside if not any(s.holds(other) for other in inside))

    @cached_property
    def bodies(self) -> tuple[Span, ...]:
        """Skipped spans with products, the shortest first; those of the first form.

        Raises:
            Unsupported: a form has more than two, or not as many as the others.
        """
        return self.bodies_of(0)

    def bodies_of(self, form: int) -> tuple[Span, ...]:
        """Return the bodies of a form, the shortest first."""
        count = len(self._every_body) // self.forms
        found = self._every_body[form * count : (form + 1) * count]
        return tuple(sorted(found, key=lambda s: s.end - s.start))

    @cached_property
    def _every_body(self) -> tuple[Span, ...]:
        """The bodies of all forms, in the program's order."""
        found = tuple(s for s in self._skipped if self._multiplies(s))
        most = BODIES * self.forms
        if len(found) > most or len(found) % self.forms:
            known = self._understood
            rule = f"a step chooses among {len(found)} bodies, and {known} are understood"
            raise unknown(self.bundles.who, rule)
        return found

    @property
    def _understood(self) -> str:
        return " or ".join(str(n * self.forms) for n in range(1, BODIES + 1))

    def usual_shares(self, row: float) -> BodyShares:
        """Return the shares of a kernel of which nothing is known.

        Every step runs the body with most products: another is for the rest of a ragged length.
        """
        counts = [self._count(range(*body)) for body in self.bodies]
        is_first = not counts or counts[0] == max(counts)
        return BodyShares(1.0, 0.0, row) if is_first else BodyShares(0.0, 1.0, row)

    @cached_property
    def edges(self) -> tuple[Span, ...]:
        """What begins and ends a row of tiles."""
        return tuple(s for s in self._skipped if s not in self._every_body)

    @cached_property
    def always(self) -> list[int]:
        """The bundles of the loop that every step runs."""
        skipped = {i for s in self._skipped for i in range(*s)}
        return [i for i in range(*self.loop.span) if i not in skipped]

    def cycles(self, shares: BodyShares) -> Cycles:
        """Return what a step costs on average."""
        issued = len(self.always) + sum(s.end - s.start for s in self.edges) / shares.row
        issued += sum(share * (body.end - body.start) for body, share in self._weights(shares))
        waited, busy = (
            sum(share * price(self.bundles, path, self.core) for path, share in self._paths(shares))
            for price in (waits, busy_cycles)
        )
        return Cycles(max(issued, busy), issued + waited)

    def use(self, shares: BodyShares) -> dict[str, float]:
        """Return the share of each unit's slots that the products' part of a step fills."""
        rows = self._products_part(shares)
        used = self.slots.used(rows)
        filled = {name: used[name] / n / len(rows) for name, n in self.slots.capacity.items()}
        return filled | {"MXU": busy_cycles(self.bundles, rows, self.core) / len(rows)}

    def used(self, shares: BodyShares) -> dict[str, int]:
        """Return how many slots of each unit a step fills, in a visited tile."""
        return self.slots.used(self._products_part(shares))

    def _weights(self, shares: BodyShares) -> list[tuple[Span, float]]:
        """Pair each body with the share of steps that run it; one body is for every tile."""
        if len(self.bodies) == 1:
            return [(self.bodies[0], shares.full + shares.masked)]
        return list(zip(self.bodies, (shares.full, shares.masked), strict=False))

    def _paths(self, shares: BodyShares) -> list[tuple[list[int], float]]:
        """Pair the bundles that run in a visited tile with the share of such steps."""
        if not self.bodies:
            return [(self.always, 1.0)]
        weights = self._weights(shares)
        return [(sorted((*self.always, *range(*body))), share) for body, share in weights]

    def _products_part(self, shares: BodyShares) -> list[int]:
        """Return the body that most steps run, or the stretch of every step with most products."""
        if self.bodies:
            body, _ = max(self._weights(shares), key=lambda pair: pair[1])
            return list(range(*body))
        return max(_stretches(self.always), key=lambda rows: self._count(rows))

    def _multiplies(self, span: Span) -> bool:
        return self._count(range(*span)) > 0

    def _count(self, rows: Sequence[int]) -> int:
        every = (products(self.bundles.rows[i], self.bundles.who) for i in rows)
        return sum(map(len, every))


def _stretches(rows: list[int]) -> list[list[int]]:
    """Divide rising numbers where one is left out."""
    found: list[list[int]] = []
    for i in rows:
        if found and found[-1][-1] == i - 1:
            found[-1].append(i)
        else:
            found.append([i])
    return found
