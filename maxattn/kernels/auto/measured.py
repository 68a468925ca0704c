"""What was measured of kernels on NVIDIA GPUs: the entries and costs of `table.json`.

Under "measured_on" a table names each kind of device, as jax calls it, that its entries were
measured on, with the files of the runs: the plan of such a device says that they were. Its costs
name theirs in the same way, which may be of several kinds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import log2
from typing import Any

from maxattn.call import Call
from maxattn.kernels.auto.predict import FittedCosts

TABLE = resources.files("maxattn.kernels.auto") / "table.json"
FULL, BAND, TILES = "full", "band", "tiles"
UNSPLIT = "flash backward without split queries"

Times = tuple[tuple[str, float], ...]
"""(kernel, ms), fastest first."""


@dataclass(frozen=True)
class MeasuredShape:
    """Hold one measured shape: milliseconds by kernel, forward and backward.

    Args:
        shape: B, T, S, N, H.
        mask: "full" (lengths included), "band" (causal, windows of tokens) or "tiles" (every other
            mask).
        forward, backward: (kernel, ms), fastest first.
        unsplit: ms of flash's backward where its queries are not split (split_queries.py); 0 where
            that was not measured.
        mask_text: the mask of "band" and "tiles", spelt; "" where that is not known.
        costs: what the times are predicted by; None where they are measured.
    """

    shape: tuple[int, int, int, int, int]
    mask: str
    forward: Times
    backward: Times
    unsplit: float = 0.0
    mask_text: str = ""
    costs: FittedCosts | None = None

    @property
    def text(self) -> str:
        """Spell the shape."""
        b, t, s, n, h = self.shape
        return f"B={b} T={t} S={s} N={n} H={h}"

    @property
    def by_total(self) -> tuple[str, ...]:
        """Name the kernels that were measured both ways, fastest first."""
        backward = dict(self.backward)
        both = {name: ms + backward[name] for name, ms in self.forward if name in backward}
        return tuple(sorted(both, key=lambda name: both[name]))


# ---- the file ------------------------------------------------------------------------------------


@cache
def read_documents() -> dict[str, dict[str, Any]]:
    """Read what `table.json` holds, by device kind."""
    return json.loads(TABLE.read_text())


@cache
def read_tables() -> dict[str, tuple[MeasuredShape, ...]]:
    """Read the measured shapes, by device kind."""
    tables = {device: rows["entries"] for device, rows in read_documents().items()}
    return {device: tuple(map(_entry, rows)) for device, rows in tables.items() if rows}


@cache
def read_costs() -> dict[str, FittedCosts]:
    """Read the fitted costs of the devices that have any, by device kind."""
    found = {device: rows.get("costs") for device, rows in read_documents().items()}
    return {device: FittedCosts.of_json(costs) for device, costs in found.items() if costs}


@cache
def measured_on() -> dict[str, dict[str, tuple[str, ...]]]:
    """Read which kinds of device the entries of each table were measured on, and by which runs."""
    return {device: _runs(rows) for device, rows in read_documents().items()}


@cache
def costs_measured_on() -> dict[str, dict[str, tuple[str, ...]]]:
    """Read which kinds of device the costs of each table were measured on, and by which runs."""
    return {device: _runs(rows.get("costs", {})) for device, rows in read_documents().items()}


def _runs(of: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {kind: tuple(files) for kind, files in of.get("measured_on", {}).items()}


def _entry(row: dict[str, Any]) -> MeasuredShape:
    b, t, s, n, h = row["shape"]
    times = fastest_first(row["forward"]), fastest_first(row["backward"])
    rest = row.get(UNSPLIT, 0.0), row.get("mask_text", "")
    return MeasuredShape((b, t, s, n, h), row["mask"], *times, *rest)


def fastest_first(times: dict[str, float]) -> Times:
    return tuple(sorted(times.items(), key=lambda pair: pair[1]))


# ---- the nearest entry ---------------------------------------------------------------------------


def nearest(call: Call, entries: tuple[MeasuredShape, ...]) -> MeasuredShape:
    """Return the measured shape nearest to a call."""
    kind = mask_kind(call)
    same = [e for e in entries if e.mask == kind] or [e for e in entries if e.mask == FULL]
    return min(same, key=lambda entry: _distance(call, entry))


def _distance(call: Call, entry: MeasuredShape) -> tuple[float, float]:
    """Return doublings between the head dims, and between the other sizes together."""
    b, t, s, n, h = entry.shape
    dim = max(call.head_dim, call.value_dim)  # to which kernels that were measured pad both
    size = (dim, call.q_len, call.kv_len, call.batch * call.heads)
    measured = (h, t, s, b * n)
    apart = [abs(log2(mine / its)) for mine, its in zip(size, measured, strict=True)]
    return apart[0], sum(apart[1:])


def mask_kind(call: Call) -> str:
    """Sort a mask into the kinds that were measured."""
    # Terms of keys alone (lengths, flags) cost no kernel more than the full mask does.
    of_pairs = [term for term in call.mask.terms() if not (term.is_full or term.is_of_keys)]
    if not of_pairs:
        return FULL
    band = None if len(of_pairs) > 1 or of_pairs[0].has_data else of_pairs[0].band()
    if band is None:
        return TILES
    return FULL if band.is_full else BAND
