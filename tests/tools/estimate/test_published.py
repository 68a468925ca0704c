"""Published measurements and their estimates: the printed constants, and the table.

`python -m benchmarks.tpu_estimates_published` computes the estimates again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from maxattn.block_sizes.estimated.measured import MEASURED, MeasuredTimes, beside_measured
from maxattn.devices import DEVICES
from maxattn.tools.model_shapes import read

FOLDER = Path(__file__).parent / "published"
DOCS = Path(__file__).parents[3] / "docs"
POINTS = DOCS / "measured" / "tpu-measured-elsewhere-2026-11-27.txt"
TABLES: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.json"))
}
HEAD = "| chip | kernel | call | tile | measured, ms | estimate, ms | measured / slow end |"


def ratio(point: dict[str, Any]) -> float:
    return point["measured_ms"] / point["estimate_ms"][1]


@pytest.mark.parametrize("chip", sorted({table["chip"] for table in TABLES.values()}))
def test_the_constants_are_those_of_the_points(chip):
    found = [
        ratio(point)
        for table in TABLES.values()
        if table["chip"] == chip and table["same_tile"]
        for point in table["points"]
    ]
    least, usual, most = (round(x, 2) for x in (min(found), median(found), max(found)))
    assert MEASURED[chip] == MeasuredTimes(least, usual, most, len(found))
    name = chip.removeprefix("TPU ")
    assert beside_measured(chip).startswith(
        f"{len(found)} kernels measured on {name} took {least:g}"
    )


def test_a_chip_without_points_has_no_constant():
    assert MEASURED.keys() == {table["chip"] for table in TABLES.values()} <= DEVICES.keys()
    assert beside_measured("TPU v5p") == "no kernel was measured on v5p"


@pytest.mark.parametrize("name", TABLES)
def test_a_point_has_all_that_is_needed_to_compute_it_again(name):
    table = TABLES[name]
    assert table["source"] and table["libtpu"] and (Path("benchmarks") / table["file"]).exists()
    for point in table["points"]:
        fast, slow = point["estimate_ms"]
        assert 0 < fast <= slow and len(point["tile"]) == 3 and point["published"]
        shape = read(point["shape"])
        work = shape.operations / (2 if table["mask"] == "causal" else 1)
        # A figure in TFLOP/s is a time over the pairs that its source counts.
        if point["published"].endswith(" TFLOP/s"):
            rate = work / point["measured_ms"] / 1e9
            assert rate == pytest.approx(float(point["published"].split()[0]), rel=1e-3)
        peak = DEVICES[table["chip"]].peak
        assert peak is not None and work / slow / 1e-3 < peak


def lines() -> list[str]:
    """Format the table of docs/measured."""
    made = [HEAD, "|---" * HEAD.count("| ") + "|"]
    for table in TABLES.values():
        chip, mark = table["chip"].removeprefix("TPU "), "" if table["same_tile"] else " *"
        for point in table["points"]:
            fast, slow = point["estimate_ms"]
            tile, what = " x ".join(map(str, point["tile"])), f"{table['kind']}{mark}"
            times = f"{point['measured_ms']:.4g} | {fast:.4g} to {slow:.4g} | {ratio(point):.2f}"
            made.append(
                f"| {chip} | {what}, `{point['function']}` | {point['shape']} | {tile} | {times} |"
            )
    return made


def test_the_points_are_in_a_file_and_the_guide_names_their_sources():
    head = POINTS.read_text(encoding="utf-8").partition(HEAD)[0]
    if "MAXATTN_REGOLD" in os.environ:
        POINTS.write_text(head + "\n".join(lines()) + "\n", encoding="utf-8")
    made = "\n".join(lines()) + "\n"
    assert POINTS.read_text(encoding="utf-8") == head + made, "run the test with MAXATTN_REGOLD=1"
    guide = " ".join((DOCS / "guide" / "tpu_estimates.md").read_text(encoding="utf-8").split())
    for table in TABLES.values():
        assert table["source"].partition(",")[0].partition(":")[0] in guide
