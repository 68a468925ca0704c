"""Print estimates beside the times that others measured on TPUs, and the errors:

    MAXDIFFUSION_KERNEL=custom_splash_attention.py MAXDIFFUSION_CROSS=cross_attention_pallas.py \\
        python -m benchmarks.tpu_estimates_published --log points.jsonl --write

tests/tools/estimate/published has the points, with source, tile and measured time. Each kernel is
compiled by `maxattn compile --estimate --kernel-file`, which needs libtpu and minutes; calls with
the same tile share a compile. A stopped run continues from --log. Without MaxDiffusion's sources,
and with --kept for all points, the estimates of the files are printed. After --write, which stores
new estimates in the files, update maxattn/block_sizes/estimated/measured.py.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.tpu_estimates import EstimateLog
from maxattn.block_sizes.estimated.measured import MEASURED
from maxattn.block_sizes.estimated.step_cost import StepCost, StepGrid
from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.devices import DEVICES
from maxattn.masks import FULL, MIXED
from maxattn.tools.cli.masks import read_mask
from maxattn.tools.compile.job import CompileJob
from maxattn.tools.model_shapes import Shape, read

HERE = Path(__file__).parent
FOLDER = HERE.parent / "tests" / "tools" / "estimate" / "published"
Point = dict[str, Any]


def main() -> None:
    """Print a line for each point, then the errors of each kind of kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", action="store_true", help="print the files' estimates")
    parser.add_argument("--log", type=Path, help="file to store each compiled kernel in")
    parser.add_argument("--write", action="store_true", help="store the new estimates in the files")
    parser.add_argument("--only", default="", help="part of the names of files to compile")
    parser.add_argument("--seconds", type=float, default=1800.0, help="time limit of one compile")
    parser.add_argument("--rankings", action="store_true", help="compare pairs of tiles instead")
    args = parser.parse_args()
    log = EstimateLog(args.log, args.seconds)
    if args.rankings:
        for ranking in RANKINGS:
            print(_ranking(ranking, log), flush=True)
        return
    errors: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(FOLDER.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        print(f"{path.stem}: {table['kind']}, {table['chip']}, {table['source']}")
        compiles = not args.kept and args.only in path.name and _has_source(table)
        points = _estimated(table, log) if compiles else table["points"]
        for point in points:
            print(_line(point, table), flush=True)
            if table["same_tile"]:
                errors.setdefault(f"{table['kind']}, {table['chip']}", []).append(
                    _errors(point, table)
                )
        if compiles and args.write:
            path.write_text(_text(table), encoding="utf-8")
    errors["all"] = [pair for pairs in errors.values() for pair in pairs]
    for kind, pairs in errors.items():
        words = (
            f"median {median(map(abs, each)):.1%}, worst {max(each, key=abs):+.1%}"
            for each in zip(*pairs, strict=True)
        )
        print(f"{kind}, {len(pairs)} points: slow end {', after the factor '.join(words)}")


def _has_source(table: dict[str, Any]) -> bool:
    name = table["environment"]
    if name and name not in os.environ:
        print(f"  kept estimates: {name} names no source")
        return False
    return True


def _errors(point: Point, table: dict[str, Any]) -> tuple[float, float]:
    """Return the relative error of the slow end, without and with the factor of the chip."""
    ratio = point["measured_ms"] / point["estimate_ms"][1]
    return ratio - 1, ratio / MEASURED[table["chip"]].usual - 1


def _line(point: Point, table: dict[str, Any]) -> str:
    (fast, slow), measured = point["estimate_ms"], point["measured_ms"]
    before, after = _errors(point, table)
    tile = "/".join(map(str, point["tile"]))
    return (
        f"  {point['shape']}  {point['function']} {tile}: {fast:.4g} to {slow:.4g} ms estimated by"
        f" libtpu {table['libtpu']}'s schedule, {measured:.4g} measured ({point['published']}),"
        f" {1 + before:.3f} times the slow end, {after:+.1%} after the factor"
    )


def _text(table: dict[str, Any]) -> str:
    head = "\n".join(
        f"  {json.dumps(key)}: {json.dumps(value)},"
        for key, value in table.items()
        if key != "points"
    )
    points = ",\n".join(f"    {json.dumps(point)}" for point in table["points"])
    return f'{{\n{head}\n  "points": [\n{points}\n  ]\n}}\n'


# ---- estimates -----------------------------------------------------------------------------------


def _estimated(table: dict[str, Any], log: EstimateLog) -> Iterator[Point]:
    """Yield the points with new estimates."""
    compiled: dict[tuple[Any, ...], tuple[Shape, dict[str, Any]]] = {}
    for point in table["points"]:
        shape = _shape(point["shape"], table)
        # A grid of one tile compiles to another program.
        is_single = (shape.q_len, shape.kv_len) == tuple(point["tile"][:2])
        key = point["function"], *point["tile"], shape.kv_heads, is_single
        if key not in compiled:
            made = _shape(point.get("compiled", point["shape"]), table)
            compiled[key] = made, _kernel(table, point, made, log)
        made, kernel = compiled[key]
        point["estimate_ms"] = _milliseconds(kernel, made, shape, table["chip"])
        yield point


def _shape(text: str, table: dict[str, Any]) -> Shape:
    return replace(read(text), mask=read_mask(table["mask"]))


def _kernel(table: dict[str, Any], point: Point, shape: Shape, log: EstimateLog) -> dict[str, Any]:
    """Compile a point's function for a shape, and return its kernel's estimate."""
    q, kv, compute = point["tile"]
    sizes = FlashBlockSizes(block_q=q, block_kv=kv, block_kv_compute=compute)
    config = AttentionConfig(attention="flash", flash_block_sizes=sizes)
    file = f"{HERE / table['file']}:{point['function']}"
    is_flat = table["layout"] == "flat"
    how: dict[str, Any] = {"estimate": True, "kernel_file": file, "flat": is_flat}
    job = CompileJob(table["target"], config, shape, devices=1, **how)
    key = [table["target"], point["function"], *point["tile"], shape.name]
    made = log.estimate(key, job)
    assert "failed" not in made, made
    (kernel,), table["libtpu"] = made["kernels"], made["libtpu"]
    return kernel


def _milliseconds(kernel: dict[str, Any], made: Shape, shape: Shape, chip: str) -> list[float]:
    """Estimate a call from the cost of a step, compiled for another number of tiles."""
    if made == shape:
        seconds = kernel["seconds"]
    else:
        block = kernel["block"]
        full, masked = _visited(made, block)
        lanes = kernel["steps"] / (full + masked)
        full, masked = _visited(shape, block)
        rows, visited = shape.q_len / block[0], full + masked
        grid = StepGrid(round(lanes), rows, visited / rows, masked / visited)
        seconds = StepCost.of(kernel["cost"]).seconds(grid, DEVICES[chip])
    return [float(f"{1e3 * end:.4g}") for end in seconds]


def _visited(shape: Shape, block: list[int]) -> tuple[float, float]:
    """Return a head's tiles without and with a test of the mask, as fractions at the edges."""
    if shape.mask.is_full:
        return shape.q_len / block[0] * shape.kv_len / block[1], 0.0
    kinds = shape.mask.block_map(block[0], block[1], shape.q_len, shape.kv_len)
    return float((kinds == FULL).sum()), float((kinds == MIXED).sum())


# ---- rankings ------------------------------------------------------------------------------------

VMEM = "--xla_tpu_scoped_vmem_limit_kib=61440"
SHAPE = "1,32768,32768,12,128"  # no padding, so that no mask is evaluated


class Ranking(NamedTuple):
    """Two tiles, and the published speedup of the second over the first."""

    target: str
    kernel: str
    slow: tuple[int, int, int]
    fast: tuple[int, int, int]
    published: str


RANKINGS = (
    Ranking("v6e:1x1", "flash", (512, 512, 512), (1024, 1024, 1024),
            "axlearn #958: a third faster"),
    Ranking("v6e:1x1", "flash", (512, 512, 512), (2048, 2048, 1024),
            "MaxDiffusion's YAMLs: 3024/2048/1024 in place of 512 on v6e"),
    Ranking("v5p:2x2x1", "flash", (512, 512, 512), (2048, 2048, 1024),
            "MaxDiffusion's YAMLs: 3024/2048/1024 in place of 512 on v5p"),
)  # fmt: skip


def _ranking(ranking: Ranking, log: EstimateLog) -> str:
    one, other = (_time(ranking, blocks, log) for blocks in (ranking.slow, ranking.fast))
    tiles = " over ".join("/".join(map(str, b)) for b in (ranking.slow, ranking.fast))
    head = f"{ranking.target} {ranking.kernel}, time of {tiles}"
    if isinstance(one, str) or isinstance(other, str):
        return f"{head}: no estimate ({one}; {other})"
    rates = " over ".join(f"{t.flops / t.slow:.0f} to {t.flops / t.fast:.0f}" for t in (one, other))
    ratios = f"{one.slow / other.slow:.2f} (slow ends), {one.fast / other.fast:.2f} (fast ends)"
    words = f"{rates} TFLOP/s, estimated by libtpu {one.libtpu}'s schedule, not run"
    return f"{head}: {ratios}; {words}; {ranking.published}"


class Time(NamedTuple):
    """The seconds of a forward, its work in TFLOP, and the version of libtpu."""

    fast: float
    slow: float
    flops: float
    libtpu: str


def _time(ranking: Ranking, blocks: tuple[int, int, int], log: EstimateLog) -> Time | str:
    """Estimate a forward about as large as Wan 1.3B at 480p, or return why that fails."""
    os.environ["LIBTPU_INIT_ARGS"] = VMEM
    q, kv, compute = blocks
    sizes = FlashBlockSizes(block_q=q, block_kv=kv, block_kv_compute=compute)
    config = AttentionConfig(attention=ranking.kernel, flash_block_sizes=sizes)
    job = CompileJob(ranking.target, config, read(SHAPE), devices=1, estimate=True)
    made = log.estimate([ranking.target, ranking.kernel, *blocks, SHAPE], job)
    if "failed" in made:
        return made["failed"]
    (kernel,) = made["kernels"]
    if tuple(kernel["block"]) != blocks[:2]:
        return f"the tile became {kernel['block']}"
    fast, slow = kernel["seconds"]
    return Time(fast, slow, kernel["flops"] / 1e12, made["libtpu"])


if __name__ == "__main__":
    main()
