"""Who measured what `auto` takes on a GPU: maxattn there, who published it, or nobody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.devices import device_of
from maxattn.jax_private.versions import Versions
from maxattn.kernels.auto import gpu, published
from maxattn.kernels.auto.choose import choose_kernel
from maxattn.kernels.auto.measured import costs_measured_on
from maxattn.tools.bench.auto_table import shapes
from maxattn.tools.bench.grid.calls import of_shape
from maxattn.tools.bench.grid.rows import GridRow
from maxattn.tools.model_shapes import SHAPES

ROOT = Path(__file__).parents[2]
FA4 = (("fa4-jax", "0.1.0"),)
CUDNN_913 = ("nvidia-cudnn-cu12", "9.13.1")
WAN = SHAPES["wan-14b-480p"].call()


def named(kind: str, *packages: tuple[str, str]) -> ma.Target:
    return ma.Target.named(kind, packages)


def chosen(target: ma.Target, call: ma.Call = WAN) -> tuple[str, str]:
    choice = choose_kernel(call, target)
    return choice.name, choice.because


# ---- published figures ---------------------------------------------------------------------------


def test_what_others_published_is_said_to_be_theirs() -> None:
    for row in published.ROWS:
        version = row.cudnn.first
        kind = {(10, 0): "B200"}[row.capability]
        target = named(kind, *FA4, ("nvidia-cudnn-cu13", version))
        name, because = chosen(target, replace(WAN, head_dim=row.head_dims[0], scale=0.0))
        assert name == row.first and row.source in because
        assert "published" in because and "not measured by maxattn here" in because


@pytest.mark.parametrize(
    "call",
    [
        replace(WAN, head_dim=64, scale=0.0),
        replace(WAN, kv_len=512),
        replace(WAN, dtype="float16"),
        replace(WAN, mask=M.Causal().bind(WAN.q_len, WAN.kv_len)),
        replace(WAN, mask=M.KeyPadding(np.array([9]))),
    ],
)
def test_outside_of_what_was_published_the_rule_holds(call: ma.Call) -> None:
    name, because = chosen(named("B200", *FA4, CUDNN_913), call)
    assert name == "cudnn" and because.startswith("a rule, not measured on this GPU")


@pytest.mark.parametrize(
    ("kind", "version"), [("B200", "9.15"), ("B300", "9.19"), ("H200", "9.13")]
)
def test_other_versions_and_gpus_are_not_published(kind: str, version: str) -> None:
    target = named(kind, *FA4, ("nvidia-cudnn-cu12", version))
    assert published.row_for(WAN, target) is None


def test_cudnn_of_no_known_version_is_the_newest() -> None:
    rows = [
        published.row_for(WAN, named("B200", *FA4, *its))
        for its in ((), (("tokamax", "0.0.17"),), (CUDNN_913,))
    ]
    assert rows[0] is rows[1] and rows[0] is not None and rows[2] is not None
    assert rows[0].cudnn.hold("9.22") and rows[2].cudnn == Versions("9.13", "9.14")


# ---- what was measured where ---------------------------------------------------------------------


def test_the_table_was_measured_where_it_says() -> None:
    """The runs are of that device, and what is fastest in them is what the entries take."""
    for device, kinds in gpu.measured_on().items():
        assert kinds, f"name the run of {device} under measured_on in table.json"
        for kind, files in kinds.items():
            assert not disagreements(gpu.read_tables()[device], rows_on(kind, files)), kind


def test_the_runs_of_costs_are_of_the_devices_that_name_them() -> None:
    for device, kinds in costs_measured_on().items():
        assert all(rows_on(kind, files) for kind, files in kinds.items()), device
        assert {device_of(kind).family for kind in kinds} <= {device_of(device).family}


def rows_on(kind: str, files: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return what files of docs/measured hold of a kind of device; a later file comes later."""
    documents = (json.loads((ROOT / file).read_text(encoding="utf-8")) for file in files)
    runs = [run for document in documents for run in _runs(document)]
    assert runs and {run["machine"]["device"] for run in runs} == {kind}
    return [row for run in runs for each in run["rows"] for row in _flat(each) if row["ms"]]


def _flat(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row as `bench` measures shapes; those of a grid hold every kernel of a call."""
    if "call" not in row:
        return [row]
    call = GridRow.of_json(row)
    names = [shape.name for shape in shapes() if of_shape(shape) == call.call]
    return [
        {"shape": name, "what": what, "who": who, "ms": ms}
        for name in names
        for what, times in call.times.items()
        for who, ms in times.items()
    ]


def _runs(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [document] if "rows" in document else [run for run in document.values() if "rows" in run]


def disagreements(entries: tuple[gpu.MeasuredShape, ...], rows: list[dict[str, Any]]) -> list[str]:
    """List entries without two kernels in the runs, or with one faster by over a twentieth."""
    found, last = [], {(r["shape"], r["what"], r["who"]): r["ms"] for r in rows}
    for shape, entry in zip(shapes(), entries, strict=True):
        for what, times in (("forward", entry.forward), ("backward", entry.backward)):
            asked = [(who, (shape.name, what, who)) for who, _ in times]
            its = {who: last[key] for who, key in asked if key in last}
            first = next(iter(its), "nothing")  # of what was run, auto takes the first
            if len(its) < 2 or its[first] > 1.05 * min(its.values()):
                found.append(f"{shape.name} {what}: {first}, and the runs say {its}")
    return found


def test_runs_that_say_otherwise_are_seen() -> None:
    entries, files = gpu.read_tables()["NVIDIA H200"], gpu.measured_on()["NVIDIA H200"]
    rows = rows_on("NVIDIA H200", files["NVIDIA H200"])
    slow = [r | {"ms": 9.0} if r["who"] == "flash" else r for r in rows]
    assert not disagreements(entries, rows)
    assert disagreements(entries, slow) and disagreements(entries, rows[:4])
    with pytest.raises(AssertionError):
        rows_on("NVIDIA H100 80GB HBM3", files["NVIDIA H200"])


def test_a_device_is_measured_by_an_entry_of_its_name() -> None:
    sxm = ma.Target("gpu", "NVIDIA H100 80GB HBM3", FA4)
    pcie, h100 = replace(sxm, device_kind="NVIDIA H100 PCIe"), named("H100", *FA4)
    gh200 = replace(sxm, device_kind="NVIDIA GH200 480GB")
    assert gpu.is_measured_on(sxm) and gpu.is_measured_on(h100)
    assert not gpu.is_measured_on(pcie) and not gpu.is_measured_on(gh200)
    call = SHAPES["flux-1024"].call()
    assert chosen(sxm, call)[1].endswith("measured on an NVIDIA H100 80GB HBM3")
    assert chosen(pcie, call)[1].endswith(
        "measured on an NVIDIA H100, and this is NVIDIA H100 PCIe"
    )
    of_costs = "measured on an NVIDIA H200 and an NVIDIA H100, and this is NVIDIA GH200 480GB"
    assert chosen(gh200)[1].endswith(of_costs)
