"""`maxattn bench`: times kernels, libraries, meshes and modules on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from maxattn.errors import InputError
from maxattn.tools.cli.inputs import read_mesh as read_sizes
from maxattn.tools.cli.options import STRATEGIES
from maxattn.tools.cli.progress import progress, say_where
from maxattn.tools.model_shapes import Shape, read
from maxattn.tools.writable import check_writable, write_whole

if TYPE_CHECKING:
    from maxattn.target import Target

GPU_SHAPES = (
    "wan-1.3b-480p", "wan-14b-720p", "wan-cross", "flux-1024", "sdxl-64", "sdxl-32", "sdxl-cross",
)  # fmt: skip
CPU_SHAPES = ("1,256,256,4,64", "1,1024,1024,4,64", "2,1024,77,4,64")
MESH_AXES = ("data", "context", "tensor")


def run(args: argparse.Namespace) -> int:
    """Measure; print and write the results; return 1 if nothing could be measured."""
    from maxattn.target import Target
    from maxattn.tools.bench.row import to_json

    _check(args)
    target = Target.here()
    default = CPU_SHAPES if target.platform == "cpu" else GPU_SHAPES
    shapes = [read(name) for name in [*args.shapes, *args.shape] or default]
    say_where(", ".join(args.report or [shape.name for shape in shapes]), target)
    rows: list[Any] = []
    with progress():
        measured = _reports(args, target) if args.report else _measured(args, target, shapes)
        for new, text in measured:
            rows += new
            print(text, end="\n\n", flush=True)
            if args.json:  # written after each measurement: a run may be killed
                args.json.parent.mkdir(parents=True, exist_ok=True)
                write_whole(args.json, to_json(rows, target))
    return 0 if any(row.ms for row in rows) else 1


def _measured(
    args: argparse.Namespace, target: Target, shapes: list[Shape]
) -> Iterator[tuple[list[Any], str]]:
    from maxattn.tools.bench.kernels import bench
    from maxattn.tools.bench.mesh import bench_mesh
    from maxattn.tools.bench.module import bench_module
    from maxattn.tools.bench.row import as_table
    from maxattn.tools.xla_options import xla_options

    mesh, options = read_mesh(args.mesh), xla_options(args.option)
    kernel = (*args.kernel, "auto")[0]
    measuring = args.seconds, options
    for shape in shapes:
        if mesh:
            strategies = args.strategy or STRATEGIES[:3]
            new = bench_mesh(shape, mesh, strategies, kernel, args.peers, *measuring)
        elif args.module:
            new = bench_module(shape, kernel, args.param_dtype, *measuring)
        else:
            new = bench(shape, tuple(args.kernel), args.peers, target, args.seconds)
        yield new, as_table(new)


def _reports(args: argparse.Namespace, target: Target) -> Iterator[tuple[list[Any], str]]:
    from maxattn.tools.bench.reports import draw, make

    for name in args.report:
        report = make(name, target, args.seconds)
        if args.pictures:
            draw(report, target.device_kind, args.pictures / f"{name}.png")
        yield report.rows, report.text


def read_mesh(words: list[str]) -> dict[str, int]:
    """Read the axes of --mesh, such as `context=4`."""
    import jax

    found, text = read_sizes(words), " ".join(words)
    devices = prod(found.values())
    if not set(found) <= set(MESH_AXES) or devices < 1:
        rule = f"it must be AXIS=N, with N at least 1 and an axis of {', '.join(MESH_AXES)}"
        raise InputError("--mesh", text, rule, "write for example --mesh context=4")
    if devices > jax.device_count():
        rule = f"it needs {devices} devices, and this machine has {jax.device_count()}"
        raise InputError("--mesh", text, rule, "name fewer devices")
    return found


def _check(args: argparse.Namespace) -> None:
    from maxattn.tools.bench.kernels import check_kernels

    spread, module = args.mesh and not args.report, args.module and not args.report
    with_either = "--mesh or --module, without --report"
    for name, given, is_read, other in (
        ("--option", " ".join(args.option), spread or module, with_either),
        ("--strategy", " ".join(args.strategy), spread, "--mesh, without --report"),
        ("--pictures", args.pictures, args.report, "--report"),
    ):
        if given and not is_read:
            remedy = f"change the options so, or leave {name} out"
            raise InputError(name, given, f"it applies only with {other}", remedy)
    if args.module and args.mesh:
        rule = "a whole module is measured on one device"
        raise InputError("--module", "given", rule, "leave out --mesh or --module")
    if not 0 < args.seconds < float("inf"):
        rule = "it must be a number of seconds above 0"
        raise InputError("--seconds", args.seconds, rule, "write --seconds 0.5")
    check_kernels(args.kernel)
    if args.json:
        check_writable("--json", args.json)
    if args.pictures:
        check_writable("--pictures", args.pictures, folder=True)
