"""A kernel's dump as a `StepCost`: the same sums as its estimate, for a grid of any length."""

from __future__ import annotations

from maxattn.block_sizes.estimated.step_cost import StepCost
from maxattn.errors import Unsupported
from maxattn.tools.estimate.bundles import Span
from maxattn.tools.estimate.kernel import KernelDump
from maxattn.tools.estimate.matrix_unit import busy_cycles, waits
from maxattn.tools.estimate.slots import SPILLS
from maxattn.tools.estimate.step import BodyShares

KEYS = 1, 2  # the inputs K and V


def step_cost_of(dump: KernelDump, columns: int, steps: int) -> StepCost:
    """Return what a step costs.

    Args:
        dump: of a compile whose grid has several rows and columns of tiles.
        columns: tiles of a row in that compile.
        steps: all of them.

    Raises:
        Unsupported: the dump is not understood, or has another number of steps.
    """
    step, cores = dump.step, dump.cores
    made = steps if step.loop.steps is None else step.loop.steps * cores
    if made != steps:
        rule = f"its grid has {made} steps where {steps} were compiled"
        raise Unsupported("estimate", dump.name, rule, "leave this kernel out of the estimate")
    full, masked = (_body(dump, place) for place in (0, -1))
    used = step.used(BodyShares(1.0, 0.0, float(columns)))
    in_step, in_row = _bytes(dump, columns, steps)
    edges = sum(s.end - s.start for s in step.edges)
    always = len(step.always)
    return StepCost(always, edges, full, masked, cores, in_step, in_row, used[SPILLS])


def online_cost_of(dump: KernelDump, cost: StepCost) -> StepCost | None:
    """Return what a step costs whose softmax is the online one; None where a kernel has but one.

    Args:
        dump: of the kernel.
        cost: of the same kernel, for scores that need no running maximum.
    """
    if dump.step.forms == 1:
        return None
    spans = dump.step.bodies_of(1)
    full, masked = (_priced(dump, spans[place]) for place in (0, -1))
    spills = dump.slots.used([*range(*spans[0])])[SPILLS]
    return cost._replace(full=full, masked=masked, spills=spills)


def _body(dump: KernelDump, place: int) -> tuple[float, float, float]:
    """Return what a body costs; all of a step where none is."""
    return _priced(dump, dump.step.bodies[place] if dump.step.bodies else Span(0, 0))


def _priced(dump: KernelDump, body: Span) -> tuple[float, float, float]:
    """Return bundles, waits and busy cycles of a step with a body."""
    path, core = sorted((*dump.step.always, *range(*body))), dump.step.core
    issued = body.end - body.start
    return issued, waits(dump.bundles, path, core), busy_cycles(dump.bundles, path, core)


def _bytes(dump: KernelDump, columns: int, steps: int) -> tuple[int, int]:
    """Return bytes between HBM and the kernel: of a step, and of a row beside its steps."""
    in_step, in_row, rows = float(dump.own_bytes), 0.0, steps // columns
    inputs = [w for w in dump.windows if not w.is_output]
    outputs = [w for w in dump.windows if w.is_output]
    for place, window in enumerate(inputs):
        at_each = (place in KEYS) != (dump.phase == "dkv")
        in_step += window.in_hbm * window.size * at_each
        in_row += window.in_hbm * window.size * (not at_each)
    for window in outputs:
        at_each = window.blocks == steps
        in_step += window.in_hbm * window.size * at_each
        in_row += window.in_hbm * window.size * window.blocks / rows * (not at_each)
    return round(in_step), round(in_row)
