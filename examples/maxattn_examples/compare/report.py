"""What a comparison found: a table, and a YAML file with checkpoint, machine and date."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from jaxtyping import Float

import maxattn as ma
from maxattn.weights.replacing import replacing
from maxattn_examples.common.statistics import paired, table

from .ways import DENSE, FLOOR, Arm, Count

PerClip = Float[np.ndarray, " n"]


@dataclass
class Row:
    """What was measured of one way of sampling, clip by clip.

    Args:
        arm: the way.
        count: of its forwards.
        seconds: of its steps, for all clips, without compiling.
        drift: at the end.
        psnr: of the latents, in dB.
        steps: median error of the steps that reuse or approximate, of all where none does, from the
            dense samples, of each clip; None if not measured.
        pictures: more scores by name, where samples were decoded.
        notes: why figures of it are not there.
        of: what its drift depends on beside the weights; sampling compares its run with it.
    """

    arm: Arm
    count: Count
    seconds: float
    drift: PerClip
    psnr: PerClip
    steps: PerClip | None = None
    pictures: Mapping[str, PerClip] = field(default_factory=dict)
    of: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Report:
    """All ways of sampling beside the dense one.

    Args:
        facts: of the run, such as the hash of its checkpoint.
        rows: in the order in which they ran.
    """

    facts: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def floor(self) -> float | None:
        """The median drift of dense sampling with another kernel, where that was run."""
        return next((float(np.median(x.drift)) for x in self.rows if x.arm.name == FLOOR), None)

    def text(self) -> str:
        """Return a table in Markdown, and what its columns are."""
        heads = ["sampling", "forwards", "seconds", "drift", "worst", "x floor", "a step", "PSNR"]
        more = list(dict.fromkeys(name for row in self.rows for name in row.pictures))
        heads += [*more, "against the same cost"]
        lines = [self._cells(row, more) for row in self.rows]
        said = (
            "drift: |x - dense| / |dense| of the final latents, median of the clips; x floor: in"
            " multiples of dense sampling with another kernel; a step: error from the dense"
            " samples, as a share of the step, median of the steps that reuse or approximate (of"
            " all steps where none does); PSNR: of latents, dB. All of them measure distance from"
            " the dense samples, not beauty."
        )
        notes = ["floor: both kernels give the same samples"] if self.floor == 0 else []
        notes += [f"{row.arm.name}: {note}" for row in self.rows for note in row.notes]
        return "\n".join([table(heads, lines), said, *notes])

    def _cells(self, row: Row, more: Sequence[str]) -> list[str]:
        floor = self.floor
        times = "" if not floor else f"{np.median(row.drift) / floor:.1f}"
        dense = row.arm.name == DENSE
        return [
            row.arm.name,
            f"{row.count.computed:g} of {row.count.whole}",
            f"{row.seconds:.1f}",
            "" if dense else f"{np.median(row.drift):.4f}",
            "" if dense else f"{row.drift.max():.4f}",
            "" if dense else times,
            "" if row.steps is None else f"{np.median(row.steps):.4f}",
            "" if dense else f"{np.median(row.psnr):.1f}",
            *(f"{np.median(row.pictures[x]):.3f}" if x in row.pictures else "" for x in more),
            self._beside(row),
        ]

    def _beside(self, row: Row) -> str:
        """Say in how many clips a shortcut is nearer to the dense sample than fewer plain steps."""
        other = next((x for x in self.rows if x.arm.name == row.arm.same_cost), None)
        if other is None:
            return ""
        found = paired(row.drift, other.drift, better=-1)
        return f"nearer in {found.better} of {len(row.drift)} clips, p {found.p:.1g}"

    def plain(self) -> dict[str, Any]:
        """Return all of it as what YAML can hold."""
        return {**self.facts, "floor": self.floor, "rows": [self._plain(row) for row in self.rows]}

    def _plain(self, row: Row) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": row.arm.name,
            "changes": dict(row.arm.changes),
            "of": dict(row.of),
            "forwards": [row.count.computed, row.count.whole],
            "seconds": round(row.seconds, 3),
            "drift": [round(float(x), 6) for x in row.drift],
            "psnr": [round(float(x), 3) for x in row.psnr],
        }
        if row.steps is not None:
            found["step_error"] = [round(float(x), 6) for x in row.steps]
        found |= {k: [round(float(x), 5) for x in v] for k, v in row.pictures.items()}
        if row.notes:
            found["notes"] = list(row.notes)
        if row.arm.same_cost is not None:
            found |= {"same_cost": row.arm.same_cost, "against": self._beside(row)}
        return found

    def write(self, path: Path) -> Path:
        """Write it; the file takes its name when it is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(yaml.safe_dump(self.plain(), sort_keys=False), "utf-8")
        return path


def machine_facts() -> dict[str, str]:
    """Return the machine and the date of a measurement."""
    device = jax.devices()[0]
    return {
        "machine": f"{len(jax.devices())} x {device.device_kind}",
        "versions": f"maxattn {ma.__version__}, jax {jax.__version__}",
        "date": datetime.date.today().isoformat(),
    }
