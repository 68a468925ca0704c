"""Measure attention on this machine: every kernel that can run, forward and backward, and auto.

  maxattn bench                                    the shapes of Wan, SDXL and Flux (small ones on a CPU)
  maxattn bench wan-1.3b-480p sdxl-cross           named shapes
  maxattn bench --shape 2,4608,4608,24,128         B,T,S,N,H[,K]
  maxattn bench sdxl-64 --kernel flash --kernel auto
  maxattn bench --peers                            other libraries beside them, called bare
  maxattn bench --write-table                      measure the table that auto reads, and write it

Times are of the device: short calls are compiled together into one program, so that the host does not count.
"""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path
from typing import Any

from maxattn.errors import InputError
from maxattn.shapes import SHAPES, Shape, read

HELP = "measure kernels on this machine: device time, TFLOP/s, memory, error"
GPU_SHAPES = ("wan-1.3b-480p", "wan-14b-720p", "wan-cross", "flux-1024", "sdxl-64", "sdxl-32", "sdxl-cross")
CPU_SHAPES = ("1,256,256,4,64", "1,1024,1024,4,64", "2,1024,77,4,64")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shapes", nargs="*", metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--shape", action="append", default=[], metavar="B,T,S,N,H", help="a shape without a name")
    parser.add_argument("--kernel", action="append", default=[], metavar="KERNEL", help="measure this one (and others)")
    parser.add_argument("--peers", action="store_true", help="other libraries too: cuDNN, TransformerEngine, ...")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
    parser.add_argument("--write-table", action="store_true", help="measure and write the table that auto reads")
    parser.add_argument("--seconds", type=float, default=0.5, help="for one measurement, about (default 0.5)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from maxattn import bench
    from maxattn.bench.table import kernels as of_table
    from maxattn.target import Target

    target = Target.here()
    asked = _shapes(args, target.platform)
    rows = []
    for shape in asked:
        kernels = tuple(args.kernel) or (of_table(shape) if args.write_table else ())
        rows += (new := bench.bench(shape, kernels, args.peers, target, args.seconds))
        print(bench.as_table(new), end="\n\n", flush=True)
        if args.json:
            args.json.write_text(bench.to_json(rows, target))
    if args.write_table:
        _write(target, rows, asked)
    return 0


def _shapes(args: argparse.Namespace, platform: str) -> list[Shape]:
    if args.write_table:
        from maxattn.bench.table import shapes

        return shapes()
    named = [*args.shapes, *args.shape]
    return [read(name) for name in named or (CPU_SHAPES if platform == "cpu" else GPU_SHAPES)]


def _write(target: Any, rows: list[Any], measured: list[Shape]) -> None:
    from maxattn.bench.table import PATH, write

    if target.platform != "gpu":
        raise InputError("--write-table", target.device_kind, "the table is of NVIDIA GPUs", "run it on one")
    versions = dict(target.packages)
    made_by = {"date": date.today().isoformat(), "command": "maxattn bench --write-table", **versions}
    write(target.device_kind, made_by, rows, measured)
    print(f"wrote {PATH}")
