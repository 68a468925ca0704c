"""The table that `auto` reads on NVIDIA GPUs: which shapes are measured, fitted costs, its form.

The installed table is `maxattn/kernels/auto/table.json`. A new one is written where the user says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from maxattn.config.plain_json import read_json
from maxattn.devices import device_of
from maxattn.errors import ConfigError
from maxattn.kernels.auto.cost_terms import BACKWARD, FORWARD
from maxattn.kernels.auto.measured import TABLE, UNSPLIT, mask_kind
from maxattn.kernels.auto.predict import FittedCosts
from maxattn.tools.bench.grid.calls import of_shape
from maxattn.tools.bench.grid.rows import GridRow, is_ours
from maxattn.tools.model_shapes import SHAPES, Shape, read
from maxattn.tools.writable import write_whole

# The models' own shapes, and small and large ones between and around them.
MEASURED = (
    "sdxl-cross",
    "sdxl-32",
    "sdxl-32-cross",
    "sdxl-64",
    "wan-cross",
    "flux-1024",
    "wan-1.3b-480p",
    "swba-1560x7",
    "swba-256x16",
    "1,256,256,8,64",
    "1,1024,1024,16,128",
    "2,4096,4096,8,256",
)


def shapes() -> list[Shape]:
    """Return the models' shapes, and those around them."""
    return [SHAPES[name] if name in SHAPES else read(name) for name in MEASURED]


def entries(rows: Sequence[GridRow], measured: Sequence[Shape]) -> list[dict[str, Any]]:
    """Return one entry a shape: ms by kernel, forward and backward, without those that failed.

    A shape without all of its times has none.

    Args:
        rows: of a grid that holds the shapes, on one device.
        measured: the shapes, in the table's order.
    """
    by_call = {row.call: row for row in rows}
    found = ((shape, by_call.get(of_shape(shape))) for shape in measured)
    return [_entry(shape, row) for shape, row in found if row and _is_whole(row)]


def _is_whole(row: GridRow) -> bool:
    """Tell whether no time is missing: one that was taken back may be of the fastest kernel."""
    forward, backward = (set(its) - set(row.failed) for its in _times(row).values())
    return all(_times(row).values()) and forward == backward


def _entry(shape: Shape, row: GridRow) -> dict[str, Any]:
    size = [shape.batch, shape.q_len, shape.kv_len, shape.heads, shape.head_dim]
    call = shape.call()
    text = {} if call.mask.is_full else {"mask_text": str(call.mask)}
    return {"shape": size, "mask": mask_kind(call), **text, **_times(row)}


def _times(row: GridRow) -> dict[str, dict[str, float]]:
    """Return ms by pass and kernel."""
    return {
        what: {who: round(ms, 4) for who, ms in row.times[what].items() if is_ours(who)}
        for what in (FORWARD, BACKWARD)
    }


class NewTable(NamedTuple):
    """Hold what a table gets of one device.

    Attributes:
        device: its kind, as jax calls it.
        made_by: versions, the day, the command.
        entries: of shapes; none leaves those that are there.
        costs: fitted; None leaves those that are there.
        files: of the rows, by the device that they were measured on, as they are named in the
            project.
    """

    device: str
    made_by: dict[str, Any]
    entries: list[dict[str, Any]]
    costs: FittedCosts | None = None
    files: Mapping[str, Sequence[str]] = MappingProxyType({})


def write(new: NewTable, path: Path) -> None:
    """Replace what a table says of a device, and keep what it says of others.

    Args:
        new: what it gets.
        path: the table to write; where it is missing, it begins as the one that `auto` reads.
    """
    table = read_table(path) if path.exists() else json.loads(TABLE.read_text())
    kind = device_of(
        new.device
    ).kind  # of "NVIDIA H100 80GB HBM3" the NVIDIA H100, which auto looks up
    old = table.get(kind, {})
    table[kind] = (_replaced(old, new) if new.entries else old) | _costs(new)
    write_whole(path, json.dumps(table, indent=1) + "\n")


def _replaced(old: dict[str, Any], new: NewTable) -> dict[str, Any]:
    # `bench` launches this backward with split queries alone: its time without them is kept.
    kept = {tuple(e["shape"]): e[UNSPLIT] for e in old.get("entries", []) if UNSPLIT in e}
    measured = [e | _unsplit(kept, tuple(e["shape"])) for e in new.entries]
    rest = {"costs": old["costs"]} if "costs" in old else {}
    on = {new.device: list(new.files.get(new.device, ()))}
    return {"measured_on": on, "made_by": new.made_by, "entries": measured, **rest}


def _costs(new: NewTable) -> dict[str, Any]:
    if new.costs is None:
        return {}
    on = {kind: list(files) for kind, files in ({new.device: ()} | dict(new.files)).items()}
    return {"costs": {"measured_on": on, "made_by": new.made_by} | new.costs.to_json()}


def read_table(path: Path) -> dict[str, Any]:
    """Read a table of entries by device.

    Raises:
        ConfigError: it is something else: the measurements would have no place to go.
    """
    try:
        table = read_json(path)
    except (OSError, ValueError) as error:
        raise _no_table(path, str(error)) from None
    by_device = table.values() if isinstance(table, dict) else [None]
    if not all(isinstance(of, dict) and _are_entries(of.get("entries")) for of in by_device):
        raise _no_table(path, "it holds something else")
    return table


def _are_entries(listed: Any) -> bool:
    is_list = isinstance(listed, list)
    return is_list and all(isinstance(e, dict) and isinstance(e.get("shape"), list) for e in listed)


def _no_table(path: Path, why: str) -> ConfigError:
    rule = f"where a file is there, it is a table that `bench` wrote; {why}"
    return ConfigError("--write-table", path, rule, "name another file, or remove it")


def _unsplit(kept: dict[tuple[int, ...], float], shape: tuple[int, ...]) -> dict[str, float]:
    return {UNSPLIT: kept[shape]} if shape in kept else {}
