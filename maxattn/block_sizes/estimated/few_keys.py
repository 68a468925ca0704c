"""The time of `tpu_few_keys`, from the shipped schedules of some numbers of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from maxattn.block_sizes.estimated.choose import in_ms
from maxattn.block_sizes.estimated.step_cost import (
    Evaluates,
    Kind,
    Seconds,
    StepCost,
    StepGrid,
    Tile,
)
from maxattn.block_sizes.estimated.table import shipped_costs
from maxattn.block_sizes.few_keys import FEW_KEYS, FewKeysTile, tile_of
from maxattn.block_sizes.sizes import ITEMSIZE, LANES, round_up
from maxattn.call import Call
from maxattn.target import Target

KINDS: tuple[Kind, ...] = ("fwd", "fused", "online")


class FewKeysTimes(NamedTuple):
    """The estimated seconds of a forward, of a backward, and of a forward of large scores."""

    forward: Seconds
    backward: Seconds
    online: Seconds

    def __str__(self) -> str:
        also = f" ({in_ms(self.online)} if scores may be large)"
        return f"{in_ms(self.forward)} forward{also}, {in_ms(self.backward)} backward"


def few_keys_seconds(call: Call, target: Target) -> FewKeysTimes | None:
    """Estimate a call of `tpu_few_keys`; None if no schedules of its head dim and dtype ship."""
    costs = shipped_costs(target.device_kind, FEW_KEYS, call.head_dim, call.dtype)
    passes = []
    for kind in KINDS:
        tile = tile_of(call, target, backward=kind == "fused")
        hides = bool(call.kv_len % LANES) or not call.mask.is_full
        known = costs.get((kind, Evaluates.PADDING if hides else Evaluates.NOTHING), {})
        if not known or tile is None:
            return None
        passes.append(_seconds(known, tile, call, target, kind))
    return FewKeysTimes(*passes)


def _seconds(
    known: Mapping[Tile, StepCost], tile: FewKeysTile, call: Call, target: Target, kind: Kind
) -> Seconds:
    """Interpolate the cycles of a query and head by the number of keys; HBM may take longer."""
    core, machine = target.device.core, target.device.machine
    assert core is not None and machine is not None, target.device_kind
    keys = round_up(call.kv_len, LANES)
    per_query = {
        n: [c / (queries * heads) for c in cost.cycles(StepGrid(1, 1, 1, 0.0))]
        for (queries, n, heads), cost in known.items()
    }
    cores = next(iter(known.values())).cores
    queries = call.batch * call.heads * round_up(call.q_len, tile.queries)
    # q and out; in the backward q, dout and dq. K and V are short.
    arrays = 3 if kind == "fused" else 2
    moved = arrays * call.batch * call.q_len * call.heads * call.head_dim * ITEMSIZE[call.dtype]
    hbm = moved / machine.hbm
    fast, slow = (
        queries * _at(keys, {n: ends[i] for n, ends in per_query.items()}) / cores / core.clock
        for i in (0, 1)
    )
    return Seconds(max(fast, hbm), max(slow, hbm))


def _at(x: int, known: Mapping[int, float]) -> float:
    """Interpolate, or extend from the two nearest numbers of keys."""
    places = sorted(known)
    if len(places) == 1:
        return known[places[0]] * x / places[0]
    above = min(max(1, sum(n < x for n in places)), len(places) - 1)
    a, b = places[above - 1], places[above]
    return known[a] + (known[b] - known[a]) * (x - a) / (b - a)
