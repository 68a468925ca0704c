"""The table that `auto` reads on NVIDIA GPUs: which shapes and kernels are measured, and its form.

The installed table is `maxattn/kernels/auto/table.json`. A new one is written where the user says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxattn.config.plain_json import read_json
from maxattn.devices import device_of
from maxattn.errors import ConfigError
from maxattn.kernels.auto.gpu import TABLE, UNSPLIT, mask_kind
from maxattn.tools.bench.row import BACKWARD, FORWARD, BenchRow
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
FUSED = ("cudnn", "cudnn_flash_te", "flash", "tokamax_flash")
PLAIN = ("dot_product",)
FEW_SCORES = 2e8  # up to which the plain kernels can win, and are measured


def kernels(shape: Shape) -> tuple[str, ...]:
    """Return what is measured of a shape."""
    few = shape.batch * shape.heads * shape.q_len * shape.kv_len <= FEW_SCORES
    return FUSED + PLAIN if few else FUSED


def shapes() -> list[Shape]:
    """Return the shapes of the table."""
    return [SHAPES[name] if name in SHAPES else read(name) for name in MEASURED]


def entries(rows: Sequence[BenchRow], measured: Sequence[Shape]) -> list[dict[str, Any]]:
    """Return one entry a shape: ms by kernel, forward and backward, without those that failed.

    Args:
        rows: from `bench`.
        measured: the shapes, in the table's order.
    """
    found = ((shape, _times(rows, shape)) for shape in measured)
    return [
        {"shape": _size(shape), "mask": mask_kind(shape.call()), **times}
        for shape, times in found
        if all(times.values())
    ]


def _times(rows: Sequence[BenchRow], shape: Shape) -> dict[str, dict[str, float]]:
    """Return ms by pass and kernel."""
    times: dict[str, dict[str, float]] = {FORWARD: {}, BACKWARD: {}}
    for row in rows:
        if row.shape == shape.name and row.ms and row.what in times:
            times[row.what][row.who] = round(row.ms, 4)
    return times


def _size(shape: Shape) -> list[int]:
    return [shape.batch, shape.q_len, shape.kv_len, shape.heads, shape.head_dim]


def write(device: str, made_by: dict[str, Any], found: list[dict[str, Any]], path: Path) -> None:
    """Replace a device's entries and keep those of other devices.

    Args:
        device: its kind, as jax calls it.
        made_by: versions, the day, the command.
        found: from `entries`.
        path: the table to write; where it is missing, it begins as the one that `auto` reads.
    """
    table = read_table(path) if path.exists() else json.loads(TABLE.read_text())
    kind = device_of(device).kind  # of "NVIDIA H100 80GB HBM3" the NVIDIA H100, which auto looks up
    # `bench` launches this backward with split queries alone: its time without them is kept.
    old = table.get(kind, {}).get("entries", [])
    kept = {tuple(e["shape"]): e[UNSPLIT] for e in old if UNSPLIT in e}
    measured = [e | _unsplit(kept, tuple(e["shape"])) for e in found]
    table[kind] = {"measured_on": {device: []}, "made_by": made_by, "entries": measured}
    write_whole(path, json.dumps(table, indent=1) + "\n")


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
