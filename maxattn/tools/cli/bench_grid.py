"""`maxattn bench --grid`, `--against`, `--fit` and `--write-table`: drawn calls, auto's costs."""

from __future__ import annotations

import argparse
import logging
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxattn.devices import device_of
from maxattn.errors import InputError
from maxattn.tools.cli.progress import progress, say_where
from maxattn.tools.writable import write_whole

if TYPE_CHECKING:
    from maxattn.target import Target
    from maxattn.tools.bench.grid.calls import GridCall
    from maxattn.tools.bench.grid.rows import GridRow

log = logging.getLogger("maxattn.tools.bench")
SECONDS = 0.05  # for one measurement: a grid has thousands
LIMIT = 3600.0  # for all of them
DRAWN = 60


def is_asked_for(args: argparse.Namespace) -> bool:
    """Tell whether the command is about a grid."""
    reads = bool(args.fit or args.against)
    return reads or args.grid is not None or args.write_table is not None


def run(args: argparse.Namespace, target: Target) -> int:
    """Measure a grid or read one; print what `auto` makes of it; write the table."""
    if args.grid is not None or args.against:
        _hold(args, target)
        return 0
    rows = _read("--fit", args.fit) if args.fit else _measured(args, target, _calls())
    _fit(args, target, rows)
    return 0


def _hold(args: argparse.Namespace, target: Target) -> None:
    """Print what `auto` takes over the best: of drawn calls, or of what was measured before."""
    from maxattn.tools.bench.grid.draw import draw
    from maxattn.tools.bench.grid.report import against_best

    if args.against:
        rows, target = _read("--against", args.against), _machine(args.against)
    else:
        rows = _measured(args, target, [call for seed in args.grid for call in draw(seed, DRAWN)])
    print(against_best(rows, target))


def _machine(files: list[Path]) -> Target:
    """Return the machine that rows were measured on.

    Raises:
        InputError: no file says which packages it had: `auto` takes of those alone.
    """
    from maxattn.tools.bench.grid.rows import target_of

    found = target_of(files)
    if found is None:
        rule = "a file says on which machine its rows were measured, with which packages"
        named = " ".join(map(str, files))
        raise InputError("--against", named, rule, "name a file that bench --json wrote")
    return found


def _calls() -> list[GridCall]:
    from maxattn.tools.bench.grid.draw import fitting_calls

    return fitting_calls()


def _read(option: str, files: list[Path]) -> list[GridRow]:
    """Read rows of one kind of device, or to fit costs to of several of one family.

    Args:
        option: that names the files.
        files: of rows.

    Raises:
        InputError: a file holds none, or the files' rows are of other devices.
    """
    from maxattn.tools.bench.grid.rows import any_nameless, read_rows

    named = " ".join(map(str, files))
    try:
        rows = read_rows(files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it reads what bench measured, and found {type(error).__name__}: {error}"
        raise InputError(option, named, why, "name files of --json, or rows-*.jsonl") from None
    devices = sorted({row.device for row in rows if row.device})
    if option != "--fit":
        _check_kind(option, named, devices)
        return rows
    _check_family(option, named, devices)
    _check_fit(named, rows, len(devices) > 1 and any_nameless(files))
    return rows


def _check_fit(named: str, rows: list[GridRow], is_unclear: bool) -> None:
    if is_unclear:
        rule = "beside files of two devices, a file says on which its rows were measured"
        raise InputError("--fit", named, rule, "name files that bench --json wrote")
    if len({row.call for row in rows if any(row.times.values())}) < 2:
        rule = "it predicts each call from others, and found times of fewer than two"
        raise InputError("--fit", named, rule, "name files of a grid")


def _check_kind(option: str, named: str, devices: list[str]) -> None:
    if len(devices) != 1:
        rule = f"costs are of one kind of device, and these are of {', '.join(devices) or 'none'}"
        raise InputError(option, named, rule, "name files of one device")


def _check_family(option: str, named: str, devices: list[str]) -> None:
    families = {kind: device_of(kind).family.name for kind in devices}
    if len(set(families.values())) != 1:
        of = ", ".join(f"{kind} ({family})" for kind, family in families.items()) or "none"
        rule = f"costs are of one family of devices, and these are of {of}"
        raise InputError(option, named, rule, "name files of one family")


def _measured(args: argparse.Namespace, target: Target, calls: list[GridCall]) -> list[GridRow]:
    """Measure calls, and write the rows where --json says; beside it as they come."""
    from maxattn.tools.bench.grid.rows import to_file
    from maxattn.tools.bench.grid.run import run_grid

    machine, path = {"device": target.device_kind, "packages": dict(target.packages)}, args.json
    say_where(f"{len(calls)} calls", target)
    with progress():
        rows = run_grid(
            calls,
            args.seconds,
            args.limit or LIMIT,
            kernels=args.kernel,
            peers=int(args.peers),
            keep=(lambda found: _keep(path, to_file(found, machine))) if path else None,
        )
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, to_file(rows, machine))
        _partial(path).unlink(missing_ok=True)
    return rows


def _partial(path: Path) -> Path:
    """Name the file of what is measured so far: an earlier whole one stays until the end."""
    return path.with_suffix(f".partial{path.suffix}")


def _keep(path: Path, text: str) -> None:
    """Write what is measured so far, for a run that is ended from outside."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(_partial(path), text)
    except OSError as error:  # the run goes on: a disk may have room at its end
        log.warning("what is measured so far was not kept: %s", error)


def _fit(args: argparse.Namespace, target: Target, rows: list[GridRow]) -> None:
    """Fit costs, print what they are worth, and write them where --write-table says."""
    from maxattn.tools.bench.auto_table import NewTable, write
    from maxattn.tools.bench.grid.left_out import fit

    device = rows[0].device if args.fit else target.device_kind
    found = fit(rows, device_of(device))
    print(found.text)
    if not args.write_table:
        return
    parts = _made_by(args, target), _entries(rows, device), found.costs, _files(args, device)
    write(NewTable(device, *parts), Path(args.write_table))
    print(f"wrote {args.write_table}")


def _made_by(args: argparse.Namespace, target: Target) -> dict[str, str]:
    fitted = f"--fit {' '.join(map(str, args.fit))} " if args.fit else ""
    command = f"maxattn bench {fitted}--write-table {args.write_table}"
    made_by = {"date": date.today().isoformat(), "command": command}
    return made_by | ({} if args.fit else dict(target.packages))


def _entries(rows: list[GridRow], device: str) -> list[dict[str, Any]]:
    """Return the entries of a device's shapes; none where not all of them are there."""
    from maxattn.tools.bench.auto_table import entries, shapes

    found = entries([row for row in rows if row.device == device], shapes())
    return found if len(found) == len(shapes()) else []


def _files(args: argparse.Namespace, device: str) -> dict[str, list[str]]:
    """Name the files of the rows, by the device that they were measured on."""
    from maxattn.tools.bench.grid.rows import files_by_device

    if not args.fit:
        return {device: [str(args.json)] if args.json else []}
    return {kind: list(map(str, files)) for kind, files in files_by_device(args.fit).items()}
