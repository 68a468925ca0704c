"""Write what was measured as the table that `auto` reads (`maxattn/kernels/auto/table.json`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxattn.kernels.auto.gpu import WHOLE_ROWS, mask_kind
from maxattn.tools.bench.measure import BACKWARD, FORWARD, Row
from maxattn.tools.model_shapes import SHAPES, Shape, read

PATH = Path(__file__).parents[2] / "kernels" / "auto" / "table.json"
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
# The plain kernels are measured where they can win.
FUSED, PLAIN, FEW_SCORES = (
    ("cudnn", "cudnn_flash_te", "flash", "tokamax_flash"),
    ("dot_product",),
    2e8,
)


def kernels(shape: Shape) -> tuple[str, ...]:
    """Return what is measured of a shape."""
    few = shape.batch * shape.heads * shape.q_len * shape.kv_len <= FEW_SCORES
    return FUSED + PLAIN if few else FUSED


def shapes() -> list[Shape]:
    """Return the shapes of the table."""
    return [SHAPES[name] if name in SHAPES else read(name) for name in MEASURED]


def entries(rows: Sequence[Row], measured: Sequence[Shape]) -> list[dict[str, Any]]:
    """Return one entry a shape: ms by kernel, forward and backward, without those that failed."""
    found = []
    for shape in measured:
        times: dict[str, dict[str, float]] = {FORWARD: {}, BACKWARD: {}}
        for row in rows:
            if row.shape == shape.name and row.ms and row.what in times:
                times[row.what][row.who] = round(row.ms, 4)
        size = [shape.batch, shape.q_len, shape.kv_len, shape.heads, shape.head_dim]
        if times[FORWARD] and times[BACKWARD]:
            found.append({"shape": size, "mask": mask_kind(shape.call()), **times})
    return found


def write(
    device: str,
    made_by: dict[str, Any],
    rows: Sequence[Row],
    measured: Sequence[Shape],
    path: Path = PATH,
) -> None:
    """Replace a device's entries and keep those of other devices.

    Args:
        device: its kind.
        made_by: versions, the day, the command.
        rows: from `bench`.
        measured: the shapes, in the table's order.
        path: the table.
    """
    old = json.loads(path.read_text()) if path.exists() else {}
    found = entries(rows, measured)
    # `bench` cannot measure it any more: what it launches in parts was in whole rows before.
    kept = {
        tuple(e["shape"]): e[WHOLE_ROWS]
        for e in old.get(device, {}).get("entries", [])
        if WHOLE_ROWS in e
    }
    found = [
        e | ({WHOLE_ROWS: kept[tuple(e["shape"])]} if tuple(e["shape"]) in kept else {})
        for e in found
    ]
    old[device] = {"made_by": made_by, "entries": found}
    path.write_text(json.dumps(old, indent=1) + "\n")
