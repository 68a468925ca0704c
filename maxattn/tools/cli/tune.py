"""`maxattn tune`: time kernels, or the sizes of one, on this machine, and keep the fastest."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.config.measurements import BLOCKS, CHUNKS, read_kept
from maxattn.decide import kernel_call, named_kernel, plan
from maxattn.errors import InputError
from maxattn.kernels import build, computed_call
from maxattn.target import Target
from maxattn.tools.cli import tune_kernels, tune_offline
from maxattn.tools.cli.inputs import read_source, shapes_of
from maxattn.tools.cli.machine import mesh_of, target_of
from maxattn.tools.cli.progress import say, say_where
from maxattn.tools.cli.tune_kernels import KernelTuning, say_kept
from maxattn.tools.cli.tune_kernels_report import say_changes
from maxattn.tools.tune import kernel_times, store
from maxattn.tools.tune.candidates import Candidate, candidates
from maxattn.tuned import cache_path, in_ms, key_of, versions_of, winners, with_sizes

_TIMES = {"forward": "forward_ms", "forward and backward": "training_ms"}


def run(args: argparse.Namespace) -> int:
    """Tune each shape."""
    if args.limit < 1:
        raise InputError("limit", args.limit, "at least one candidate is timed", "write --limit 24")
    source, args.has_said_so, args.outcomes = read_source(args), False, []
    if args.offline:
        return tune_offline.run(args, source)
    config, mesh = source.config, mesh_of(args, source.config)
    target, status = replace(target_of(args, config), kernel_times=()), 0
    for number, shape in enumerate(shapes_of(args, source)):
        print("\n" if number else "", end="")
        named, because = named_kernel(shape.call(), config)
        if args.kernels:
            tune_kernels.check_kernels_are_chosen(named, because)
        is_usual = named == "auto" and target.platform != "tpu"
        if args.kernels or (is_usual and not args.sizes):
            data = args.mask if shape.mask.has_data else ""
            kernels = KernelTuning(shape, config, mesh, target, data)
            status = max(status, tune_kernels.tune(args, kernels))
            continue
        made = plan(shape.call(), config, mesh, replace(target, tuned=()))
        for kernel in made.kernel.name.split("/"):
            local = kernel_call(made.padded_call, made.strategy)
            local = computed_call(kernel, local, target.platform)
            mask = "" if local.mask.is_full else f" {local.mask}"
            what = f"one device's {local.role}-attention {local.shape_text}{mask}"
            print(f"{shape.name}: {kernel}, {what}", flush=True)
            _tune_sizes(args, SizeTuning(config, kernel, local, target))
    if len(args.outcomes) > 1:
        say_changes(args.outcomes)
    return status


@dataclass(frozen=True)
class SizeTuning:
    """Hold what sizes are tuned for: settings, kernel, one device's call, machine."""

    config: AttentionConfig
    kernel: str
    local: Call
    target: Target

    def identity(self, candidate: Candidate) -> dict[str, Any]:
        """Return what a measurement is found by."""
        return {
            "device_kind": self.target.device_kind,
            "versions": versions_of(self.kernel, self.target.packages),
            "kernel": self.kernel,
            "call": key_of(self.local),
            "sizes": dict(candidate.sizes),
        }

    @property
    def is_here(self) -> bool:
        """Whether this machine runs the kernel; on a CPU all others are interpreted."""
        runs = self.kernel == CHUNKS or self.target.platform != "cpu"
        return self.target.untuned() == Target.here().untuned() and runs


def _tune_sizes(args: argparse.Namespace, tuning: SizeTuning) -> None:
    local, kernel, target = tuning.local, tuning.kernel, tuning.target
    if kernel != CHUNKS and (kernel not in BLOCKS or target.platform == "gpu"):
        print(f"  {kernel} has no sizes to tune on {target.device_kind}")
        return
    as_computed = local.derived(dtype="float32") if tuning.config.float32_qk_product else local
    found = candidates(kernel, as_computed, target, not args.forward, args.limit)
    if not args.target and tuning.is_here:
        _timed(args, tuning, found)
        return
    why = f"{target.device_kind} is not here (or is a CPU's interpreter)"
    print(f"  an estimate: {why}, so nothing is timed or kept")
    print(f"  {'of T x S':>8}  {'steps':>7}  sizes")
    for candidate in sorted(found, key=lambda c: c.cost):
        mark = "  (runs where nothing is set)" if candidate is found[0] else ""
        print(f"  {candidate.share:8.2%}  {candidate.steps:7}  {candidate}{mark}")
    best = min(found, key=lambda c: c.cost)
    print(
        f"  least work and fewest steps together:\n{tune_offline.yaml_to_set(kernel, best.sizes)}"
    )


# ---- on the device -------------------------------------------------------------------------------


def _timed(args: argparse.Namespace, tuning: SizeTuning, found: tuple[Candidate, ...]) -> None:
    with store.writable_copy(cache_path()) as (path, problem):
        say_kept(path, "" if args.has_said_so else problem, f"{len(found)} candidates")
        args.has_said_so = bool(problem)
        say_where(f"{tuning.kernel}, a candidate after the other,", tuning.target)
        for number, candidate in enumerate(found, start=1):
            say(f"  {number}/{len(found)}  {candidate}")
            measured, old = _measured(args, tuning, candidate, path)
            times = {name: measured[key] for name, key in _TIMES.items()}
            words = ", ".join(f"{name} {in_ms(time)}" for name, time in times.items() if time)
            words = words or f"does not run: {measured['error']}"
            before = "  (measured before)" if old else ""
            print(f"  {number:>3}/{len(found)}  {words:<40}  {candidate}{before}", flush=True)
        _print_winner(tuning, found[0], path, is_kept=not problem)


def _measured(
    args: argparse.Namespace, tuning: SizeTuning, candidate: Candidate, path: Path
) -> tuple[dict[str, Any], bool]:
    """Return a measurement, and whether it was there already."""
    identity = tuning.identity(candidate)
    skipped = {"forward_ms": args.train, "training_ms": args.forward}
    wanted = [key for key, skip in skipped.items() if not skip]
    old = store.find(path, identity)
    if old and not args.again and (old["error"] or all(old[key] is not None for key in wanted)):
        return old, True
    times: dict[str, Any] = {"error": ""}
    config = with_sizes(tuning.config, tuning.kernel, candidate.sizes)
    built = build(tuning.kernel, tuning.local, config, tuning.target)
    for key in wanted:
        timed = kernel_times.time_sizes(built, tuning.local, key == "training_ms")
        if timed.failed:  # the compiler's error or the device's; the next candidate may run
            times["error"] = timed.failed
            break
        times[key] = 1e3 * timed.seconds
    measured = identity | {"forward_ms": None, "training_ms": None} | (old or {}) | times
    store.add(path, measured)
    return measured, False


def _print_winner(tuning: SizeTuning, default: Candidate, path: Path, is_kept: bool) -> None:
    kernel, target = tuning.kernel, tuning.target
    table = winners(read_kept(path).measurements, target.device_kind, target.packages, str(path))
    call = key_of(tuning.local)
    best = next((t for t in table if t.kernel == kernel and t.call == call), None)
    if best is None:
        print("  none of them runs")
        return
    gain, before = "", store.find(path, tuning.identity(default))
    if before and (time := before["training_ms" if best.training else "forward_ms"]):
        times = f"{time / best.milliseconds:.2f} times as fast as {in_ms(time)}"
        gain = f", {times} where nothing is set"
    print(f"  fastest {best}{gain}")
    kept = "plans on this machine take it where the config sets none; " if is_kept else ""
    print(f"  {kept}to set it:\n{tune_offline.yaml_to_set(kernel, best.sizes)}")
