"""What `maxattn bench` refuses before it measures: options that nothing reads, wrong values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from maxattn.errors import InputError
from maxattn.tools.cli.machine import read_mesh as read_sizes
from maxattn.tools.model_shapes import SHAPES
from maxattn.tools.writable import check_writable

STRATEGIES = ("ring", "ulysses", "all_gather", "ulysses_ring")
REPORTS = ("implementations", "block-window", "layers")
MESH_AXES = ("data", "context", "tensor")


def check(args: argparse.Namespace) -> None:
    """Refuse what would be found out after the measurements, or never.

    Raises:
        InputError: for an option without the one that it belongs to, a time that is none, a name of
            no kernel, and a table without a path or of another machine than an NVIDIA GPU.
        ConfigError: for a path that cannot be written to.
    """
    from maxattn.tools.bench.jobs import check_kernels

    _check_together(args)
    _check_against(args)
    _check_grid(args)
    if not 0 < args.seconds < float("inf"):
        rule = "a measurement takes some time"
        raise InputError("--seconds", args.seconds, rule, "write --seconds 0.5")
    check_kernels(args.kernel)
    _check_table(args.write_table, bool(args.fit))
    if args.json:
        check_writable("--json", args.json)
    if args.pictures:
        check_writable("--pictures", args.pictures, folder=True)


def _check_together(args: argparse.Namespace) -> None:
    """Refuse what the measurement that is asked for would not read."""
    spread, module = args.mesh and not args.report, args.module and not args.report
    with_mesh, with_either = "--mesh, without --report", "--mesh or --module, without --report"
    ring_on = str(args.ring_on) if args.ring_on else ""
    _check_read("--option", " ".join(args.option), spread or module, with_either)
    _check_read("--profile", "given" if args.profile else "", spread or module, with_either)
    _check_read("--strategy", " ".join(args.strategy), spread, with_mesh)
    _check_read("--pictures", args.pictures, args.report, "--report")
    _check_read("--ring-on", ring_on, spread, with_mesh)
    if args.module and args.mesh:
        rule = "a whole module is measured on one device"
        raise InputError("--module", "given", rule, "leave out --mesh or --module")
    if args.ring_on and (args.peers or args.strategy):
        rule = "the ring alone runs on fewer devices, and neither --peers nor --strategy"
        remedy = "leave those out, or measure a mesh that is there"
        raise InputError("--ring-on", args.ring_on, rule, remedy)


def _check_read(name: str, given: str | Path | None, is_read: Any, other: str) -> None:
    if given and not is_read:
        remedy = "add what it is read with, or leave it out"
        raise InputError(name, given, f"it is read with {other}", remedy)


def _check_grid(args: argparse.Namespace) -> None:
    """Refuse what a grid does not read: it draws its own calls, for one NVIDIA GPU."""
    from maxattn.target import Target

    if args.grid is None:
        return
    if args.fit or args.write_table is not None:
        rule = "a drawn grid is held against auto, and takes no part in its table"
        raise InputError("--grid", _said(args.grid), rule, "leave out --fit and --write-table")
    if min(args.grid) < 0:
        raise InputError("--grid", _said(args.grid), "a seed is a number from 0", "write --grid 1")
    if (target := Target.here()).device.vendor != "NVIDIA":
        rule = "the grid is of the kernels of NVIDIA GPUs"
        raise InputError("--grid", target.device_kind, rule, "run it on one")


def _said(words: Sequence[Any]) -> str:
    return " ".join(map(str, words))


def _check_against(args: argparse.Namespace) -> None:
    """Refuse what is not read where nothing is measured, and a limit of what has none."""
    measures = args.grid is not None or (args.write_table is not None and not args.fit)
    _check_read("--limit", args.limit, measures, "--grid, or --write-table without --fit")
    if args.limit is not None and not 0 < args.limit < float("inf"):
        raise InputError("--limit", args.limit, "it is seconds above 0", "write --limit 600")
    if args.against and (args.grid is not None or args.fit or args.write_table is not None):
        rule = "it reads what was measured, and measures and fits nothing"
        remedy = "leave out --grid, --fit and --write-table"
        raise InputError("--against", _said(args.against), rule, remedy)


def _check_table(path: str | None, is_read: bool) -> None:
    from maxattn.target import Target
    from maxattn.tools.bench.auto_table import read_table

    if path is None:
        return
    if not path or path in SHAPES:
        # argparse takes a shape's name that follows the option for its path.
        rule = "the table is written where you say, never into the installed package"
        remedy = " ".join(["write --write-table table.json", path]).strip()
        raise InputError("--write-table", path or "(no path)", rule, remedy)
    check_writable("--write-table", path)
    if Path(path).exists():
        read_table(Path(path))
    if not is_read and (target := Target.here()).device.vendor != "NVIDIA":
        rule = "the table is of NVIDIA GPUs"
        raise InputError("--write-table", target.device_kind, rule, "run it on one")


def read_mesh(words: list[str], ring_on: int = 0) -> dict[str, int]:
    """Read axes: `context=4`.

    Args:
        words: of --mesh.
        ring_on: how many devices run the ring, where it has more ranks; else 0.

    Raises:
        MeshError: for what is no axis and size, and an axis named twice.
        InputError: for another axis, more devices than there are, and a ring that does not fit.
    """
    import jax

    found, text = read_sizes(words), " ".join(words)
    devices = prod(found.values())
    if not set(found) <= set(MESH_AXES) or devices < 1:
        rule = f"it is AXIS=N, N at least 1, with an axis of {', '.join(MESH_AXES)}"
        raise InputError("--mesh", text, rule, "write for example --mesh context=4")
    if ring_on and (set(found) != {"context"} or not 2 <= ring_on < devices):
        rule = "two devices or more run a ring of more ranks, --mesh context=M alone"
        remedy = "write for example --mesh context=4 --ring-on 2"
        raise InputError("--ring-on", ring_on, rule, remedy)
    if found and (needed := ring_on or devices) > jax.device_count():
        rule = f"it needs {needed} devices, and this machine has {jax.device_count()}"
        raise InputError("--mesh", text, rule, "ask for fewer")
    return found
