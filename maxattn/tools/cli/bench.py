"""Measure attention on this machine: every kernel that can run, forward and backward, and auto.

  maxattn bench
      the shapes of Wan, SDXL and Flux (small ones on a CPU)
  maxattn bench wan-1.3b-480p sdxl-cross
      named shapes
  maxattn bench --shape 2,4608,4608,24,128
      B,T,S,N,H[/V][,K]
  maxattn bench --shape 2,4608,4608,24,128 --kernel flash --kernel auto
  maxattn bench --peers
      other libraries beside them, called bare
  maxattn bench wan-14b-480p --mesh context=4
      ring, Ulysses and all-gather beside one device
  maxattn bench wan-14b-480p --mesh context=4 --ring-on 2
      a ring of four ranks on two devices: its time and bytes, wrong numbers
  maxattn bench wan-1.3b-480p --module
      a whole FlaxAttention, beside its attention and its matmuls
  maxattn bench --report implementations --pictures out
      tables and pictures: implementations, block-window, layers
  maxattn bench --grid 1
      60 drawn calls: what auto takes over the best
  maxattn bench --write-table table.json
      measure what auto reads, and write it: models' shapes, and a grid to fit costs to
  maxattn bench --fit rows.json --write-table table.json
      fit costs to rows that are measured

Times are of the device: short calls are compiled together into one program, so that the host does
not count. GiB are those of one device: arguments, results and temporaries, as the compiler reports
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxattn.tools.cli import bench_grid
from maxattn.tools.cli.bench_options import REPORTS, STRATEGIES, check, read_mesh
from maxattn.tools.cli.progress import progress, say_where
from maxattn.tools.model_shapes import SHAPES, Shape, read
from maxattn.tools.writable import write_whole

if TYPE_CHECKING:
    from maxattn.target import Target

GPU_SHAPES = (
    "wan-1.3b-480p", "wan-14b-720p", "wan-cross", "flux-1024", "sdxl-64", "sdxl-32", "sdxl-cross",
)  # fmt: skip
CPU_SHAPES = ("1,256,256,4,64", "1,1024,1024,4,64", "2,1024,77,4,64")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _what(parser)
    _where(parser)
    _output(parser)


def _what(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"action": "append", "default": []}
    add = parser.add_argument
    add("shapes", nargs="*", metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    add("--shape", **several, metavar="B,T,S,N,H", help="a shape without a name")
    add("--kernel", **several, metavar="KERNEL", help="measure this one (and others)")
    add("--peers", action="store_true", help="other libraries too: cuDNN, TransformerEngine, ...")
    add("--module", action="store_true", help="a whole FlaxAttention beside its parts")
    dtype = "of the module's parameters (default float32)"
    add("--param-dtype", default="float32", metavar="DTYPE", help=dtype)
    add("--report", **several, choices=REPORTS, help="measure and write one of the reports")


def _where(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"action": "append", "default": []}
    add = parser.add_argument
    mesh = "spread over devices: data, context, tensor"
    add("--mesh", **several, metavar="AXIS=N", help=mesh)
    strategy = "with --mesh (default: the first three)"
    add("--strategy", **several, choices=STRATEGIES, help=strategy)
    ring = "with --mesh context=M: run the ring of M ranks on N devices"
    add("--ring-on", "--played-by", type=int, default=0, metavar="N", help=ring)
    option = "with --mesh or --module: of XLA's compiler"
    add("--option", **several, metavar="NAME=VALUE", help=option)


def _output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pictures", type=Path, metavar="FOLDER", help="draw the reports there, as NAME.png")
    profile = "with --mesh or --module: print the device time by kernel"
    add("--profile", action="store_true", help=profile)
    written = "write the measurements; those of a grid that still runs are in FILE's .partial"
    add("--json", type=Path, metavar="FILE", help=written)
    table = "measure the table that auto reads, and write it to PATH"
    add("--write-table", nargs="?", const="", metavar="PATH", help=table)
    add("--fit", nargs="+", type=Path, default=[], metavar="FILE", help="fit costs to these rows")
    drawn = "measure 60 drawn calls a seed: what auto takes over the best"
    add("--grid", type=int, nargs="+", metavar="SEED", help=drawn)
    limit = f"of a grid, in all; what is measured by then counts (default {bench_grid.LIMIT:.0f})"
    add("--limit", type=float, metavar="SECONDS", help=limit)
    held = "measure nothing: what auto takes over the best of what --grid measured"
    add("--against", nargs="+", type=Path, default=[], metavar="FILE", help=held)
    seconds = f"for one measurement, about (default 0.5; of a grid {bench_grid.SECONDS})"
    add("--seconds", type=float, help=seconds)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from maxattn.target import Target

    if args.seconds is None:
        args.seconds = bench_grid.SECONDS if bench_grid.is_asked_for(args) else 0.5
    check(args)
    target = Target.here()
    if bench_grid.is_asked_for(args):
        return bench_grid.run(args, target)
    shapes = _shapes(args, target.platform)
    say_where(", ".join(args.report or [shape.name for shape in shapes]), target)
    with progress():
        _print(args, target, shapes)
    return 0


def _print(args: argparse.Namespace, target: Target, shapes: list[Shape]) -> None:
    """Measure and print; what is measured so far stands in the file of --json."""
    from maxattn.tools import bench

    rows: list[Any] = []
    measured = _reports(args, target) if args.report else _measured(args, target, shapes)
    for new, text in measured:
        rows += new
        print(text, end="\n\n", flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            write_whole(args.json, bench.to_json(rows, target))


def _measured(
    args: argparse.Namespace, target: Target, shapes: list[Shape]
) -> Iterator[tuple[list[Any], str]]:
    """Measure shape by shape: yield (rows, their table)."""
    from maxattn.tools import bench
    from maxattn.tools.xla_options import xla_options

    mesh, options = read_mesh(args.mesh, args.ring_on), xla_options(args.option)
    for shape in shapes:
        if mesh:
            new = _on_mesh(args, shape, mesh, options)
        elif args.module:
            new = _of_module(args, shape, options)
        else:
            new = bench.bench(shape, tuple(args.kernel), args.peers, target, args.seconds)
        yield new, bench.as_table(new)


def _on_mesh(
    args: argparse.Namespace, shape: Shape, mesh: dict[str, int], options: dict[str, Any]
) -> list[Any]:
    from maxattn.tools.bench.mesh import bench_mesh

    kernel, *_ = (*args.kernel, "auto")
    strategies = args.strategy or STRATEGIES[:3]
    measuring = (args.seconds, options, args.profile)
    return bench_mesh(shape, mesh, strategies, kernel, args.peers, *measuring, args.ring_on)


def _of_module(args: argparse.Namespace, shape: Shape, options: dict[str, Any]) -> list[Any]:
    from maxattn.tools.bench.module import bench_module

    kernel, *_ = (*args.kernel, "auto")
    return bench_module(shape, kernel, args.param_dtype, args.seconds, options, args.profile)


def _reports(args: argparse.Namespace, target: Target) -> Iterator[tuple[list[Any], str]]:
    """Measure report by report: yield (rows, text)."""
    from maxattn.tools.bench.plots import draw
    from maxattn.tools.bench.reports import make

    for name in args.report:
        report = make(name, target, args.seconds)
        if args.pictures:
            draw(report, target.device_kind, args.pictures / f"{name}.png")
        yield list(report.rows), report.text


def _shapes(args: argparse.Namespace, platform: str) -> list[Shape]:
    named = [*args.shapes, *args.shape]
    return [read(name) for name in named or (CPU_SHAPES if platform == "cpu" else GPU_SHAPES)]
