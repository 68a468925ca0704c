"""`maxattn tune`: time kernels, or the sizes of one, on this machine, and keep the fastest."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.config.measurements import BLOCKS, CHUNKS, read_kept
from maxattn.config.write import yaml_of
from maxattn.decide import kernel_call, named_kernel, plan
from maxattn.errors import InputError
from maxattn.kernels import build, computed_call
from maxattn.target import Target
from maxattn.tools.cli import tune_kernels, tune_offline
from maxattn.tools.cli.inputs import read_source, shapes_of
from maxattn.tools.cli.machine import mesh_of, target_of
from maxattn.tools.cli.progress import say, say_where
from maxattn.tools.cli.tune_kernels import KernelTuning, say_kept
from maxattn.tools.model_shapes import Shape
from maxattn.tools.tune import store
from maxattn.tools.tune.candidates import Candidate, candidates
from maxattn.tuned import (
    Sizes,
    Tuned,
    cache_path,
    in_ms,
    key_of,
    versions_of,
    winners,
    with_sizes,
)


def run(args: argparse.Namespace) -> int:
    """Tune each shape."""
    if args.limit < 1:
        raise InputError("limit", args.limit, "at least one candidate is timed", "write --limit 24")
    source, args.has_said_so = read_source(args), False
    if args.offline:
        return tune_offline.run(args, source)
    mesh, target = mesh_of(args, source.config), target_of(args, source.config)
    target, status = replace(target, kernel_times=()), 0
    for number, shape in enumerate(shapes_of(args, source)):
        print("\n" if number else "", end="")
        if _is_of_kernels(args, shape, source.config, target):
            data = args.mask if shape.mask.has_data else ""
            kernels = KernelTuning(shape, source.config, mesh, target, data)
            status = max(status, tune_kernels.tune(args, kernels))
        else:
            _tune_sizes(args, shape, source.config, mesh, target)
    return status


def _is_of_kernels(
    args: argparse.Namespace, shape: Shape, config: AttentionConfig, target: Target
) -> bool:
    """Tell whether kernels are timed for a shape, and not the sizes of one."""
    named, because = named_kernel(shape.call(), config)
    if args.kernels:
        tune_kernels.check_kernels_are_chosen(named, because)
    is_usual = named == "auto" and target.platform != "tpu"
    return args.kernels or (is_usual and not args.sizes)


def _tune_sizes(
    args: argparse.Namespace,
    shape: Shape,
    config: AttentionConfig,
    mesh: dict[str, int],
    target: Target,
) -> None:
    made = plan(shape.call(), config, mesh, replace(target, tuned=()))
    for kernel in made.kernel.name.split("/"):
        local = computed_call(kernel, kernel_call(made.padded_call, made.strategy), target.platform)
        print(f"{shape.name}: {kernel}, one device's {_local(local)}", flush=True)
        _tune(args, Tuning(config, kernel, local, target))


@dataclass(frozen=True)
class Tuning:
    """Hold what the sizes are tuned for.

    Args:
        config: the settings, beside the sizes.
        kernel: its name.
        local: what one device computes.
        target: the machine.
    """

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
    def has_sizes(self) -> bool:
        """Whether the kernel takes sizes on this machine."""
        tiled = self.kernel in BLOCKS and self.target.platform != "gpu"
        return tiled or self.kernel == CHUNKS

    @property
    def is_here(self) -> bool:
        """Whether this machine runs the kernel; on a CPU all others are interpreted."""
        runs = self.kernel == CHUNKS or self.target.platform != "cpu"
        return self.target.untuned() == Target.here().untuned() and runs

    def yaml(self, sizes: Sizes) -> str:
        """Write the lines to paste."""
        lines = yaml_of(with_sizes(AttentionConfig(), self.kernel, sizes)).splitlines()
        return "\n".join(f"    {line}" for line in lines)


def _local(call: Call) -> str:
    mask = "" if call.mask.is_full else f" {call.mask}"
    return f"{call.role}-attention {call.shape_text}{mask}"


def _tune(args: argparse.Namespace, tuning: Tuning) -> None:
    local = tuning.local
    if not tuning.has_sizes:
        print(f"  {tuning.kernel} has no sizes to tune on {tuning.target.device_kind}")
        return
    as_computed = local.derived(dtype="float32") if tuning.config.float32_qk_product else local
    training = not args.forward
    found = candidates(tuning.kernel, as_computed, tuning.target, training, args.limit)
    if not args.target and tuning.is_here:
        _timed(args, tuning, found)
    else:
        _ranked(tuning, found)


# ---- without the device --------------------------------------------------------------------------


def _ranked(tuning: Tuning, found: tuple[Candidate, ...]) -> None:
    why = f"{tuning.target.device_kind} is not here (or is a CPU's interpreter)"
    print(f"  an estimate: {why}, so nothing is timed or kept")
    print(f"  {'of T x S':>8}  {'steps':>7}  sizes")
    for candidate in sorted(found, key=lambda c: c.cost):
        mark = "  (runs where nothing is set)" if candidate is found[0] else ""
        print(f"  {candidate.share:8.2%}  {candidate.steps:7}  {candidate}{mark}")
    best = min(found, key=lambda c: c.cost)
    print(f"  least work and fewest steps together:\n{tuning.yaml(best.sizes)}")


# ---- on the device -------------------------------------------------------------------------------

_TIMES = {"forward": "forward_ms", "forward and backward": "training_ms"}


def _timed(args: argparse.Namespace, tuning: Tuning, found: tuple[Candidate, ...]) -> None:
    with store.writable_copy(cache_path()) as (path, problem):
        say_kept(path, "" if args.has_said_so else problem, f"{len(found)} candidates")
        args.has_said_so = bool(problem)
        say_where(f"{tuning.kernel}, a candidate after the other,", tuning.target)
        for number, candidate in enumerate(found, start=1):
            say(f"  {number}/{len(found)}  {candidate}")
            measured, old = _measured(args, tuning, candidate, path)
            before = "  (measured before)" if old else ""
            said = f"{number:>3}/{len(found)}  {_words(measured):<40}  {candidate}{before}"
            print(f"  {said}", flush=True)
        _say_winner(tuning, found[0], path, is_kept=not problem)


def _words(measured: dict[str, Any]) -> str:
    times = {name: measured[key] for name, key in _TIMES.items() if measured[key] is not None}
    text = ", ".join(f"{name} {in_ms(time)}" for name, time in times.items())
    return text or f"does not run: {measured['error']}"


def _measured(
    args: argparse.Namespace, tuning: Tuning, candidate: Candidate, path: Path
) -> tuple[dict[str, Any], bool]:
    """Return a measurement, and whether it was there already."""
    identity, wanted = tuning.identity(candidate), _wanted(args)
    old = store.find(path, identity)
    if old and not args.again and (old["error"] or all(old[key] is not None for key in wanted)):
        return old, True
    nothing: dict[str, Any] = {"forward_ms": None, "training_ms": None}
    measured = identity | nothing | (old or {}) | _times(tuning, candidate, wanted)
    store.add(path, measured)
    return measured, False


def _wanted(args: argparse.Namespace) -> list[str]:
    """List what is timed: the forward, training, or both."""
    skipped = {"forward_ms": args.train, "training_ms": args.forward}
    return [key for key, skip in skipped.items() if not skip]


def _times(tuning: Tuning, candidate: Candidate, wanted: list[str]) -> dict[str, Any]:
    """Return the times of one candidate, and the error that stopped it."""
    times: dict[str, Any] = {"error": ""}
    config = with_sizes(tuning.config, tuning.kernel, candidate.sizes)
    built = build(tuning.kernel, tuning.local, config, tuning.target)
    try:
        for key in wanted:
            times[key] = _time(built, tuning.local, key == "training_ms")
    except Exception as error:  # the compiler's or the device's; the next candidate may run
        first = (str(error).strip().splitlines() or [""])[0]
        times["error"] = f"{type(error).__name__}: {first[:200]}"
    return times


def _time(built: Any, local: Call, training: bool) -> float:
    from maxattn.tools.tune.measure import milliseconds

    return milliseconds(built, local, training)


def _say_winner(tuning: Tuning, default: Candidate, path: Path, is_kept: bool) -> None:
    kernel, target = tuning.kernel, tuning.target
    table = winners(read_kept(path).measurements, target.device_kind, target.packages, str(path))
    call = key_of(tuning.local)
    best = next((t for t in table if t.kernel == kernel and t.call == call), None)
    if best is None:
        print("  none of them runs")
        return
    before = store.find(path, tuning.identity(default))
    print(f"  fastest {best}{_gain(best, before)}")
    kept = "plans on this machine take it where the config sets none; " if is_kept else ""
    print(f"  {kept}to set it:")
    print(tuning.yaml(best.sizes))


def _gain(best: Tuned, before: dict[str, Any] | None) -> str:
    time = before["training_ms" if best.training else "forward_ms"] if before else None
    if not time:
        return ""
    gain = time / best.milliseconds
    return f", {gain:.2f} times as fast as {in_ms(time)} where nothing is set"
