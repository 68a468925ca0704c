"""Measure attention on this machine: every kernel that can run, forward and backward, and auto.

  maxattn bench                                    the shapes of Wan, SDXL and Flux (small ones on a
  CPU) maxattn bench wan-1.3b-480p sdxl-cross           named shapes maxattn bench --shape
  2,4608,4608,24,128         B,T,S,N,H[,K] maxattn bench sdxl-64 --kernel flash --kernel auto
  maxattn bench --peers                            other libraries beside them, called bare maxattn
  bench wan-14b-480p --mesh context=4      ring, Ulysses and all-gather beside one device maxattn
  bench wan-14b-480p --mesh context=4 --played-by 2
                                                   a ring of four played by two devices: time and
                                                   bytes, wrong numbers
  maxattn bench wan-1.3b-480p --module             a whole FlaxAttention, beside its attention and
  its matmuls maxattn bench --report implementations --pictures out
                                                   tables and pictures: implementations,
                                                   block-window, layers
  maxattn bench --write-table                      measure the table that auto reads, and write it

Times are of the device: short calls are compiled together into one program, so that the host does
not count. GiB are those of one device: arguments, results and temporaries, as the compiler reports
them.
"""

from __future__ import annotations

import argparse
from datetime import date
from math import prod
from pathlib import Path
from typing import Any

from maxattn.errors import InputError
from maxattn.tools.cli.common import read_mesh
from maxattn.tools.cli.progress import progress, say_where
from maxattn.tools.model_shapes import SHAPES, Shape, read
from maxattn.tools.writable import check_writable

HELP = "measure kernels on this machine: device time, TFLOP/s, memory, error"
GPU_SHAPES = (
    "wan-1.3b-480p",
    "wan-14b-720p",
    "wan-cross",
    "flux-1024",
    "sdxl-64",
    "sdxl-32",
    "sdxl-cross",
)
CPU_SHAPES = ("1,256,256,4,64", "1,1024,1024,4,64", "2,1024,77,4,64")
STRATEGIES = ("ring", "ulysses", "all_gather", "ulysses_ring")
REPORTS = ("implementations", "block-window", "layers")
MESH_AXES = ("data", "context", "tensor")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("shapes", nargs="*", metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    add("--shape", action="append", default=[], metavar="B,T,S,N,H", help="a shape without a name")
    add(
        "--kernel",
        action="append",
        default=[],
        metavar="KERNEL",
        help="measure this one (and others)",
    )
    add("--peers", action="store_true", help="other libraries too: cuDNN, TransformerEngine, ...")
    add(
        "--mesh",
        action="append",
        default=[],
        metavar="AXIS=N",
        help="spread over devices: data, context, tensor",
    )
    add(
        "--strategy",
        action="append",
        default=[],
        choices=STRATEGIES,
        help="with --mesh (default: the first three)",
    )
    add(
        "--played-by",
        type=int,
        default=0,
        metavar="N",
        help="with --mesh context=M: N devices play a ring of M",
    )
    add("--module", action="store_true", help="a whole FlaxAttention beside its parts")
    add(
        "--param-dtype",
        default="float32",
        metavar="DTYPE",
        help="of the module's parameters (default float32)",
    )
    add(
        "--report",
        action="append",
        default=[],
        choices=REPORTS,
        help="measure and write one of the reports",
    )
    add("--pictures", type=Path, metavar="FOLDER", help="draw the reports there, as NAME.png")
    add(
        "--profile",
        action="store_true",
        help="with --mesh or --module: print the device time by kernel",
    )
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="with --mesh or --module: of XLA's compiler",
    )
    add("--json", type=Path, metavar="FILE", help="write the measurements")
    add("--write-table", action="store_true", help="measure and write the table that auto reads")
    add("--seconds", type=float, default=0.5, help="for one measurement, about (default 0.5)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from maxattn.target import Target
    from maxattn.tools import bench

    _check_together(args)
    _check_values(args)
    target = Target.here()
    say_where(
        ", ".join(args.report or [shape.name for shape in _shapes(args, target.platform)]), target
    )
    rows: list[Any] = []
    with progress():
        for new, text in _reports(args, target) if args.report else _measured(args, target):
            rows += new
            print(text, end="\n\n", flush=True)
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(bench.to_json(rows, target))
    if args.write_table:
        _write(target, rows, _shapes(args, target.platform))
    return 0


def _check_together(args: argparse.Namespace) -> None:
    """Refuse what the measurement that is asked for would not read.

    Raises:
        InputError: for an argument without the one that it belongs to.
    """
    spread = args.mesh and not args.report
    whole = args.module and not args.report
    belongs = {
        "--option": (args.option, spread or whole, "--mesh or --module, without --report"),
        "--profile": (args.profile, spread or whole, "--mesh or --module, without --report"),
        "--strategy": (args.strategy, spread, "--mesh, without --report"),
        "--pictures": (args.pictures, args.report, "--report"),
        "--played-by": (
            args.played_by and [str(args.played_by)],
            spread,
            "--mesh, without --report",
        ),
    }
    for name, (given, read_there, other) in belongs.items():
        if given and not read_there:
            value = (
                given if isinstance(given, Path) else "given" if given is True else " ".join(given)
            )
            raise InputError(
                name, value, f"it is read with {other}", "add what it is read with, or leave it out"
            )
    if args.module and args.mesh:
        raise InputError(
            "--module",
            "given",
            "a whole module is measured on one device",
            "leave out --mesh or --module",
        )
    if args.played_by and (args.peers or args.strategy):
        rule = "a ring is played, and neither --peers nor --strategy"
        raise InputError(
            "--played-by", args.played_by, rule, "leave those out, or measure a mesh that is there"
        )


def _check_values(args: argparse.Namespace) -> None:
    """Refuse values that would be found out after the measurements, or never.

    Raises:
        InputError: for a time that is none, and a name of no kernel.
        ConfigError: for a place that cannot be written to.
    """
    from maxattn.tools.bench.measure import check_kernels

    if not 0 < args.seconds < float("inf"):
        raise InputError(
            "--seconds", args.seconds, "a measurement takes some time", "write --seconds 0.5"
        )
    check_kernels(args.kernel)
    if args.json:
        check_writable("--json", args.json)
    if args.pictures:
        check_writable("--pictures", args.pictures, folder=True)


def _measured(args: argparse.Namespace, target: Any) -> Any:
    """Measure shape by shape: yield (rows, their table)."""
    from maxattn.tools import bench
    from maxattn.tools.bench.mesh import bench_mesh
    from maxattn.tools.bench.module import bench_module
    from maxattn.tools.bench.table import kernels as of_table
    from maxattn.tools.xla_options import xla_options

    mesh, options, budget = _mesh(args.mesh, args.played_by), xla_options(args.option), args.seconds
    for shape in _shapes(args, target.platform):
        kernels = tuple(args.kernel) or (of_table(shape) if args.write_table else ())
        kernel = kernels[0] if kernels else "auto"
        if mesh:
            strategies = args.strategy or STRATEGIES[:3]
            new = bench_mesh(
                shape,
                mesh,
                strategies,
                kernel,
                args.peers,
                budget,
                options,
                args.profile,
                args.played_by,
            )
        elif args.module:
            new = bench_module(shape, kernel, args.param_dtype, budget, options, args.profile)
        else:
            new = bench.bench(shape, kernels, args.peers, target, budget)
        yield new, bench.as_table(new)


def _reports(args: argparse.Namespace, target: Any) -> Any:
    """Measure report by report: yield (rows, text)."""
    from maxattn.tools.bench.plots import draw
    from maxattn.tools.bench.reports import make

    for name in args.report:
        report = make(name, target, args.seconds)
        if args.pictures:
            draw(report, target.device_kind, args.pictures / f"{name}.png")
        yield list(report.rows), report.text


def _shapes(args: argparse.Namespace, platform: str) -> list[Shape]:
    if args.write_table:
        from maxattn.tools.bench.table import shapes

        return shapes()
    named = [*args.shapes, *args.shape]
    return [read(name) for name in named or (CPU_SHAPES if platform == "cpu" else GPU_SHAPES)]


def _mesh(words: list[str], played_by: int = 0) -> dict[str, int]:
    """Read axes: `context=4`.

    Raises:
        MeshError: for what is no axis and size, and an axis named twice.
        InputError: for another axis, more devices than there are, and what cannot be played.
    """
    import jax

    found = read_mesh(words)
    devices = prod(found.values())
    if not set(found) <= set(MESH_AXES) or devices < 1:
        rule = f"it is AXIS=N, N at least 1, with an axis of {', '.join(MESH_AXES)}"
        raise InputError("--mesh", " ".join(words), rule, "write for example --mesh context=4")
    if played_by and (set(found) != {"context"} or not 2 <= played_by < devices):
        rule = "two devices or more play a ring of more places, --mesh context=M alone"
        raise InputError(
            "--played-by", played_by, rule, "write for example --mesh context=4 --played-by 2"
        )
    needed = played_by or devices
    if found and needed > jax.device_count():
        there = f"this machine has {jax.device_count()}"
        raise InputError(
            "--mesh", " ".join(words), f"it needs {needed} devices, and {there}", "ask for fewer"
        )
    return found


def _write(target: Any, rows: list[Any], measured: list[Shape]) -> None:
    from maxattn.tools.bench.table import PATH, write

    if target.platform != "gpu":
        raise InputError(
            "--write-table", target.device_kind, "the table is of NVIDIA GPUs", "run it on one"
        )
    versions = dict(target.packages)
    made_by = {
        "date": date.today().isoformat(),
        "command": "maxattn bench --write-table",
        **versions,
    }
    write(target.device_kind, made_by, rows, measured)
    print(f"wrote {PATH}")
