"""The shipped step costs, `table.json`, and the version of libtpu whose schedules gave them."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from maxattn.block_sizes.estimated.step_cost import Costs, Evaluates, StepCost, Tile

NAMES = {
    Evaluates.NOTHING: "whole keys",
    Evaluates.PADDING: "padded keys",
    Evaluates.INTERVAL: "an interval of keys",
}


class ShippedCosts(NamedTuple):
    """The table of step costs."""

    libtpu: str  # the version of libtpu whose schedules gave the costs
    groups: dict[str, Costs]  # costs by `group_name`: device kind, kernel, head dim and dtype


def group_name(device_kind: str, kernel: str, head_dim: int, dtype: str) -> str:
    """Return the name of a group in the table."""
    return f"{device_kind}, {kernel}, {head_dim}, {dtype}"


@lru_cache(maxsize=1)
def shipped() -> ShippedCosts:
    """Read the shipped table."""
    text = files("maxattn.block_sizes.estimated").joinpath("table.json").read_text(encoding="utf-8")
    return read_table(text)


def shipped_costs(device_kind: str, kernel: str, head_dim: int, dtype: str) -> Costs:
    """Return the step costs of a kernel's tiles; an empty dict if the table has none."""
    return shipped().groups.get(group_name(device_kind, kernel, head_dim, dtype), {})


def read_table(text: str) -> ShippedCosts:
    """Parse the text that `table_text` wrote."""
    found, named = json.loads(text), {name: what for what, name in NAMES.items()}
    groups: dict[str, Costs] = {}
    for group, by_kernel in found["costs"].items():
        costs: dict[Any, dict[Tile, StepCost]] = {}
        for name, tiles in by_kernel.items():
            kind, _, keys = name.partition(", ")
            costs[kind, named[keys]] = {
                tuple(map(int, tile.split(" x "))): StepCost.of(c) for tile, c in tiles.items()
            }
        groups[group] = costs
    return ShippedCosts(found["libtpu"], groups)


def table_text(libtpu: str, groups: dict[str, Costs]) -> str:
    """Return a table as JSON text, with one line per tile."""
    lines = [f'{{"libtpu": {json.dumps(libtpu)}, "costs": {{']
    for name, costs in sorted(groups.items()):
        lines.append(f" {json.dumps(name)}: {{")
        for (kind, what), tiles in sorted(costs.items()):
            lines.append(f"  {json.dumps(f'{kind}, {NAMES[Evaluates(what)]}')}: {{")
            rows = (
                f"   {json.dumps(' x '.join(map(str, t)))}: {json.dumps(c)}"
                for t, c in sorted(tiles.items())
            )
            lines += [",\n".join(rows), "  },"]
        lines[-1] = "  }"
        lines.append(" },")
    lines[-1] = " }"
    return "\n".join([*lines, "}}"]) + "\n"
