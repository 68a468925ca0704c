"""Time every kernel on drawn calls of an NVIDIA GPU, and compare `auto` with the fastest.

    python benchmarks/grid.py --seeds 1 2 --limit 500 --json rows.json
    python benchmarks/grid.py --against rows.json

Processes compile in parallel, and time one after the other. Without --seeds nothing is timed: rows
are read from files, by default those of docs/measured from which the rules of `auto` were derived.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import workers
from drawn_calls import DrawnCall, draw
from workers import Remote

from maxattn.config import AttentionConfig
from maxattn.kernels import KERNELS, build, refusal, scores_of
from maxattn.kernels.auto.choose import order
from maxattn.target import Target
from maxattn.tools.tune.kernel_times import compile_pass, random_sets, time_programs
from maxattn.tools.writable import write_whole

HERE = Path(__file__).resolve()
TREE = HERE.parents[1]
DRAWN = 60  # calls for each seed
COMPILING, STUCK = 0.7, 60.0  # share of the limit for compiling; seconds to time one call
FEW_SCORES = 2e8  # with more scores the dense kernel is not timed
FORWARD, BACKWARD = "forward", "backward"
SAME = 3e-3  # ms: the difference of two runs of one program
SHOWN = 10
# A later file replaces the times of an earlier one for the same call and device. A time of null
# removes one, if the kernel is launched in another way since.
H200 = (
    "2026-11-24", "unseen-2026-11-24", "later-seeds-2026-11-24", "last-seeds-2026-11-24",
    "new-seeds-2026-11-25", "flash-2026-11-25", "blocks-2026-11-25", "orders-2026-11-25",
    "few-keys-2026-11-26", "2026-11-26", "wide-heads-2026-11-26", "three-seeds-2026-11-26",
    "two-seeds-2026-11-26", "again-2026-11-26", "beside-cache-2026-11-26", "few-queries-2026-11-26",
    "launched-otherwise-2026-11-26",
)  # fmt: skip
H100 = (
    "2026-11-25", "flash-2026-11-26", "2026-11-26", "wide-heads-2026-11-26",
    "two-seeds-2026-11-26", "dynamic-2026-11-26", "three-seeds-2026-11-26",
    "uneven-wide-heads-2026-11-26",
)  # fmt: skip
MEASURED = tuple(
    TREE / "docs" / "measured" / f"{device}-grid-{name}.json"
    for device, names in (("h200", H200), ("h100", H100))
    for name in names
)


# Every package that a kernel needs: if one was missing, its kernel has no times.
PACKAGES = (("fa4-jax", "0.1.0"), ("tokamax", "0.0.17"), ("transformer-engine-jax", "2.20.2"))


class Row(NamedTuple):
    """The milliseconds of each kernel for one call on one device."""

    call: DrawnCall
    target: Target
    forward: dict[str, float]
    backward: dict[str, float]


# ---- a worker ------------------------------------------------------------------------------------


class Worker:
    """The compiled kernels of some calls."""

    def __init__(self) -> None:
        self.target, self.programs = Target.here(), {}

    def about(self) -> dict[str, Any]:
        return {"device": self.target.device_kind, "packages": dict(self.target.packages)}

    def load(self, at: str, row: list[Any]) -> None:
        """Compile all kernels that can compute a call."""
        drawn = DrawnCall.of_json(row)
        call = drawn.call()
        few = scores_of(call) <= FEW_SCORES
        names = [n for n in KERNELS if n != "memory_efficient" and (few or n != "dot_product")]
        names = [name for name in names if refusal(name, call, self.target) is None]
        kernels = {n: build(n, call, AttentionConfig(), self.target) for n in names}
        sets = random_sets(call, drawn.mask())
        found = {what: compile_pass(kernels, what, sets) for what in (FORWARD, BACKWARD)}
        self.programs[at] = call, drawn.mask(), found

    def time(self, at: str, seconds: float) -> dict[str, Any]:
        """Time both passes of a call's kernels in turns."""
        call, mask, programs = self.programs.pop(at)
        sets, row = random_sets(call, mask), {}
        for what, its in programs.items():
            times = time_programs(its, what, sets, seconds)
            row[what] = {name: round(median(ms), 5) for name, ms in times.ms.items()}
            row.setdefault("refused", {}).update(times.failed)
            first = next((p for n, p in its.items() if n in times.ms), None)
            if what == FORWARD and first is not None:
                outs = first.compiled(sets)
                sets = [(*each, *out) for each, out in zip(sets, outs, strict=True)]
        return row


# ---- measuring -----------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the machine and a row for each drawn call; write the rows to the file as they come."""
    calls = [call for seed in args.seeds for call in draw(seed, DRAWN)]
    remotes = [Remote([str(HERE), "--worker"], TREE) for _ in range(workers.count(args.workers))]
    start, rows = perf_counter(), []

    def load(remote: Remote, its: range) -> list[int]:
        loaded = []
        for i in its:
            if perf_counter() - start > COMPILING * args.limit:
                break
            try:
                remote.ask("load", str(i), calls[i])
                loaded.append(i)
            except RuntimeError as error:
                print(f"{calls[i]}: {error}", file=sys.stderr)
        return loaded

    try:
        machine = remotes[0].ask("about")
        ranges = [range(i, len(calls), len(remotes)) for i in range(len(remotes))]
        with ThreadPoolExecutor(len(remotes)) as pool:
            loaded = list(pool.map(load, remotes, ranges))
        for remote, its in zip(remotes, loaded, strict=True):
            for i in its:
                if perf_counter() - start > args.limit:
                    return machine, rows
                try:
                    row = remote.ask("time", str(i), args.seconds, seconds=STUCK)
                except RuntimeError as error:
                    print(f"{calls[i]}: {error}", file=sys.stderr)
                    continue
                rows.append({"call": calls[i], **row})
                if args.json:
                    write_whole(args.json, as_file(machine, rows))
        return machine, rows
    finally:
        for remote in remotes:
            remote.end()


def as_file(machine: dict[str, Any], rows: Iterable[dict[str, Any]]) -> str:
    """Format rows as a file of docs/measured, one row a line."""
    lines = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f'{{\n "machine": {json.dumps(machine)},\n "rows": [\n  {lines}\n ]\n}}\n'


# ---- what was measured ---------------------------------------------------------------------------


def read_files(paths: Iterable[Path]) -> list[Row]:
    """Read files into one row for each call and device.

    If one file has a call twice, its times are the medians.
    """
    found: dict[tuple[DrawnCall, str], Row] = {}
    for path in paths:
        document = json.loads(path.read_text())
        target = Target("gpu", document["machine"]["device"], PACKAGES)
        times: dict[tuple[DrawnCall, str], dict[str, list[Any]]] = {}
        for row in document["rows"]:
            call = DrawnCall.of_json(row["call"])
            for what in (FORWARD, BACKWARD):
                for kernel, ms in row.get(what, {}).items():
                    times.setdefault((call, what), {}).setdefault(kernel, []).append(ms)
        for (call, what), its in times.items():
            key = call, target.device_kind
            row = found.setdefault(key, Row(call, target, {}, {}))
            known = getattr(row, what)
            known |= {
                n: None if None in ms else median(ms) for n, ms in its.items() if n in KERNELS
            }
    return [Row(*row[:2], *({n: x for n, x in its.items() if x} for its in row[2:]))
            for row in found.values()]  # fmt: skip


def judged(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that have two kernels or more, each timed forward and backward."""
    return [r for r in rows if len(r.forward) > 1 and r.forward.keys() == r.backward.keys()]


def by_auto(row: Row) -> tuple[str, str]:
    """Return the kernels that `auto` chooses for forward and backward, among the measured ones."""
    its = set(row.forward)
    names = (name.split("/") for name, _ in order(row.call.call(), row.target))
    return next(((n[0], n[-1]) for n in names if {*n} <= its), by_flash(row))


def by_flash(row: Row) -> tuple[str, str]:
    """Return flash for both passes, or the slowest kernel if flash was not measured."""
    passes = row.forward, row.backward
    found = ("flash" if "flash" in x else max(x, key=lambda n, x=x: x[n]) for x in passes)
    return next(found), next(found)


def report(rows: Sequence[Row]) -> str:
    """Compare choices with the fastest kernels, by all time and call by call."""
    lines = [f"{len(rows)} calls of two kernels or more"]
    fastest = sum(
        min(x, key=lambda n, x=x: x[n]) == "flash" for r in rows for x in (r.forward, r.backward)
    )
    lines.append(f"flash is the fastest in {fastest:,} of {2 * len(rows):,} passes")
    for name, choose in (("flash always", by_flash), ("auto", by_auto)):
        lines += _of_choice(name, rows, choose, SHOWN if name == "auto" else 0)
    return "\n".join(lines)


def _of_choice(
    name: str, rows: Sequence[Row], choose: Callable[[Row], tuple[str, str]], shown: int
) -> list[str]:
    chosen = [choose(row) for row in rows]
    taken = [(r.forward[f], r.backward[b]) for r, (f, b) in zip(rows, chosen, strict=True)]
    best = [(min(r.forward.values()), min(r.backward.values())) for r in rows]
    total = sum(map(sum, taken)) / sum(map(sum, best))
    lines = [f"{name}: all time over that of the fastest {total:.4f}"]
    over = {FORWARD: [_over(x[0], y[0]) for x, y in zip(taken, best, strict=True)]}
    over["both"] = [_over(sum(x), sum(y)) for x, y in zip(taken, best, strict=True)]
    for what, x in over.items():
        middle, most = np.quantile(x, (0.5, 0.95))
        lines.append(f"  {what}: median {middle:.3f}, 95% {most:.3f}, worst {max(x):.3f}")
    worst = sorted(zip(over["both"], over[FORWARD], chosen, rows, strict=True), key=lambda z: -z[0])
    for both, forward, names, row in worst[:shown]:
        lines.append(f"    {both:6.3f} {forward:6.3f}  {'/'.join(names):26} {row.call}")
    return lines


def _over(taken: float, best: float) -> float:
    return taken / best if taken - best > SAME else 1.0


def main() -> None:
    """Time drawn calls or read files, and print the report."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", help=f"draw and time {DRAWN} calls each")
    parser.add_argument("--against", type=Path, nargs="+", default=MEASURED, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=0.05, help="seconds of timing a pass")
    parser.add_argument("--limit", type=float, default=500, help="seconds for the whole run")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: by the cores")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        workers.serve(Worker())
        return
    if args.seeds:
        machine, rows = measure(args)
        path = args.json or Path("rows.json")
        write_whole(path, as_file(machine, rows))
        args.against = (path,)
    print(report(judged(read_files(args.against))))


if __name__ == "__main__":
    main()
