"""`maxattn tune`: time kernels, or the sizes of one kernel, and keep the fastest for plans.

tune_kernels.py times kernels. With --offline the sizes of a TPU that is not here are ranked by
libtpu's schedules, and marked as estimated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from maxattn._plan import Plan
from maxattn.block_sizes import adjust
from maxattn.block_sizes.estimated.choose import TIE, Estimate, in_ms, ranked, seconds_of
from maxattn.block_sizes.estimated.grids import not_priced, step_grid
from maxattn.block_sizes.estimated.measured import beside_measured
from maxattn.block_sizes.estimated.step_cost import Costs, StepCost, StepGrid
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.config.errors import plain
from maxattn.config.load import yaml_of
from maxattn.config.measurements import BLOCKS, CHUNKS, ESTIMATED, read_kept
from maxattn.config.numbers import finite
from maxattn.config.target_names import read_target
from maxattn.decide import kernel_call, named_kernel, plan
from maxattn.devices import DEVICES
from maxattn.errors import ConfigError, InputError, Unsupported
from maxattn.kernels import build, computed_call
from maxattn.measuring.columns import columns
from maxattn.target import Target
from maxattn.tools.cli import tune_kernels
from maxattn.tools.cli.compile import cycles_text
from maxattn.tools.cli.inputs import Source, mesh_of, read_source, shapes_of, target_of
from maxattn.tools.cli.progress import progress, say, say_where
from maxattn.tools.compile.job import MOST_SECONDS
from maxattn.tools.estimate.kernel import core_of
from maxattn.tools.memory import fits_alone
from maxattn.tools.tune import kernel_times, store
from maxattn.tools.tune.candidates import candidates, sizes_text
from maxattn.tools.tune.kernel_job import KernelJob
from maxattn.tools.tune.schedules import OfflineSearch, ScheduleCompiler, ScheduleLog
from maxattn.tuned import Sizes, key_of, versions_of, winners, with_sizes
from maxattn.tuned import in_ms as ms_text

_TIMES = {"forward": "forward_ms", "forward and backward": "training_ms"}
SHOWN = 8  # sizes that a ranking lists, besides the default sizes


def run(args: argparse.Namespace) -> int:
    """Tune each shape."""
    if args.limit < 1:
        raise InputError("limit", args.limit, "it must be at least 1", "write --limit 24")
    source = read_source(args)
    if args.offline:
        return _offline(args, source)
    mesh, shapes = mesh_of(args, source.config), shapes_of(args, source)
    target = replace(target_of(args, source.config), kernel_times=())
    outcomes, status = list[tune_kernels.KernelOutcome](), 0
    # With a --target nothing is kept.
    with nullcontext() if args.target else store.opened() as kept:
        for number, shape in enumerate(shapes):
            print("\n" if number else "", end="")
            named, because = named_kernel(shape.call(), source.config)
            if args.kernels:
                tune_kernels.check_kernels_are_chosen(named, because)
            is_usual = named == "auto" and target.platform != "tpu"
            if args.kernels or (is_usual and not args.sizes):
                data = args.mask if shape.mask.has_data else ""
                tuning = tune_kernels.KernelTuning(shape, source.config, mesh, target, data)
                outcome = tune_kernels.tune(args, tuning, kept)
                outcomes += [outcome] if outcome and not outcome.is_lost else []
                status = max(status, int(outcome is not None and outcome.is_lost))
                continue
            made = plan(shape.call(), source.config, mesh, replace(target, tuned=()))
            for sizes in _tunings(shape.name, source.config, made, not args.forward):
                mask = "" if sizes.local.mask.is_full else f" {sizes.local.mask}"
                print(f"{shape.name}: {sizes.kernel}, {sizes.what}{mask}", flush=True)
                _tune_sizes(args, sizes, kept)
    if len(outcomes) > 1:
        print("\n".join(tune_kernels.changes(outcomes)))
    return status


@dataclass(frozen=True)
class SizeTuning:
    """The call whose sizes are tuned: the shape's name, settings, kernel, one device's call,
    machine, and whether the backward runs too.
    """

    name: str
    config: AttentionConfig
    kernel: str
    local: Call
    target: Target
    training: bool

    @property
    def what(self) -> str:
        return f"one device's {self.local.role}-attention {self.local.shape_text}"

    @property
    def as_computed(self) -> Call:
        """The call in the dtype of its matmuls."""
        is_float32 = self.config.float32_qk_product
        return self.local.derived(dtype="float32") if is_float32 else self.local

    def identity(self, sizes: Sizes) -> dict[str, Any]:
        return {
            "device_kind": self.target.device_kind,
            "versions": versions_of(self.kernel, self.target.packages),
            "kernel": self.kernel,
            "call": key_of(self.local),
            "sizes": dict(sizes),
        }

    def to_set(self, sizes: Sizes) -> str:
        """Return the lines of YAML that set sizes, indented."""
        lines = yaml_of(with_sizes(AttentionConfig(), self.kernel, sizes)).splitlines()
        return "to set it:\n" + "\n".join(f"    {line}" for line in lines)


def _tunings(
    name: str, config: AttentionConfig, made: Plan, training: bool
) -> Iterator[SizeTuning]:
    for kernel in made.kernel.name.split("/"):
        call = kernel_call(made.padded_call, made.strategy)
        local = computed_call(kernel, call, made.target.platform)
        yield SizeTuning(name, config, kernel, local, made.target, training)


# ---- sizes, timed --------------------------------------------------------------------------------


def _tune_sizes(args: argparse.Namespace, tuning: SizeTuning, kept: store.Opened | None) -> None:
    kernel, target = tuning.kernel, tuning.target
    if kernel != CHUNKS and (kernel not in BLOCKS or target.platform == "gpu"):
        print(f"  {kernel} has no sizes to tune on {target.device_kind}")
        return
    # A CPU only interprets kernels of TPUs.
    runs = kernel == CHUNKS or target.platform != "cpu"
    if kept and runs and target.untuned() == Target.here().untuned():
        found = candidates(kernel, tuning.as_computed, target, tuning.training, args.limit)
        _timed(args, tuning, found, kept)
        return
    offline = "; --offline ranks its tiles by libtpu's schedules" if kernel in BLOCKS else ""
    print(f"  {target.device_kind} is not here, so nothing is timed or kept{offline}")


def _timed(
    args: argparse.Namespace, tuning: SizeTuning, found: tuple[Sizes, ...], kept: store.Opened
) -> None:
    kept.say(f"{len(found)} candidates")
    say_where(f"sizes of {tuning.kernel}, one after the other,", tuning.target)
    for number, sizes in enumerate(found, start=1):
        say(f"  {number}/{len(found)}  {sizes_text(sizes)}")
        measured, old = _measured(args, tuning, sizes, kept.path)
        times = {name: measured[key] for name, key in _TIMES.items()}
        words = ", ".join(f"{name} {ms_text(time)}" for name, time in times.items() if time)
        words = words or f"does not run: {measured['error']}"
        before = "  (measured before)" if old else ""
        print(f"  {number:>3}/{len(found)}  {words:<40}  {sizes_text(sizes)}{before}", flush=True)
    measurements = read_kept(kept.path).measurements
    packages = tuning.target.packages
    table = winners(measurements, tuning.target.device_kind, packages, str(kept.path))
    its = tuning.kernel, key_of(tuning.local)
    best = next((t for t in table if (t.kernel, t.call) == its), None)
    if best is None:
        print("  no candidate runs")
        return
    gain, default = "", store.find(kept.path, tuning.identity(found[0]))
    if default and (time := default["training_ms" if best.training else "forward_ms"]):
        times = f"{time / best.milliseconds:.2f} times as fast as"
        gain = f", {times} the default's {ms_text(time)}"
    print(f"  fastest {best}{gain}")
    where = "" if kept.problem else "plans on this machine take it if the config sets no sizes; "
    print(f"  {where}{tuning.to_set(best.sizes)}")


def _measured(
    args: argparse.Namespace, tuning: SizeTuning, sizes: Sizes, path: Path
) -> tuple[dict[str, Any], bool]:
    identity = tuning.identity(sizes)
    skipped = {"forward_ms": args.train, "training_ms": args.forward}
    wanted = [key for key, skip in skipped.items() if not skip]
    old = store.find(path, identity)
    if old and not args.again and (old["error"] or all(old[key] is not None for key in wanted)):
        return old, True
    times: dict[str, Any] = {"error": ""}
    config = with_sizes(tuning.config, tuning.kernel, sizes)
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


# ---- sizes, ranked by libtpu's schedules ---------------------------------------------------------


def _offline(args: argparse.Namespace, source: Source) -> int:
    kind = _tpu_of(args.target)
    if not finite(args.time_limit, 0, MOST_SECONDS):
        rule = f"it must be a number of seconds above 0, at most {MOST_SECONDS}"
        raise ConfigError("--time-limit", plain(args.time_limit), rule, "write --time-limit 120")
    with progress(), ScheduleCompiler(args.time_limit) as compiler, store.opened() as kept:
        versions = compiler.versions
        packages = tuple((name, v) for name, v in versions.items() if name != "libtpu")
        log = ScheduleLog(kept.path.with_name("schedules.jsonl"), versions)
        for number, shape in enumerate(shapes_of(args, source)):
            print("\n" if number else "", end="")
            # Each shape's plan uses the results kept for earlier shapes.
            target = Target.named(kind, packages)
            made = plan(shape.call(), source.config, mesh_of(args, source.config), target)
            for tuning in _tunings(shape.name, source.config, made, not args.forward):
                _check_ranked(tuning, kernel_call(made.padded_call, made.strategy))
                _rank(tuning, compiler, log, args.limit, kept)
    return 0


def _tpu_of(target: str | None) -> str:
    if not target:
        remedy = "write --target v6e, or leave --offline out to time this machine"
        raise ConfigError("--offline", "no --target", "--offline needs a named TPU", remedy)
    kind = read_target(target).kind
    if DEVICES[kind].platform != "tpu":
        rule = f"sizes are ranked by the schedules of a TPU's compiler, and {kind} is no TPU"
        remedy = "name one of v4, v5e, v5p, v6e and v7x, or leave --offline out"
        raise Unsupported("--offline", kind, rule, remedy)
    core_of(DEVICES[kind])
    return kind


def _check_ranked(tuning: SizeTuning, call: Call) -> None:
    if tuning.kernel not in BLOCKS:
        rule = f"only {' and '.join(BLOCKS)} have tiles on TPUs, and the plan has {tuning.kernel}"
        raise Unsupported("--offline", tuning.name, rule, "write attention=flash")
    if why := not_priced(call):
        rule = f"libtpu's schedules cannot rank its tiles: {why}"
        raise Unsupported("--offline", f"mask {tuning.local.mask}", rule, "leave the mask out")


def _rank(
    tuning: SizeTuning,
    compiler: ScheduleCompiler,
    log: ScheduleLog,
    limit: int,
    kept: store.Opened,
) -> None:
    local, target, kernel = tuning.as_computed, tuning.target, cast(KernelKind, tuning.kernel)
    print(f"{tuning.name}: {kernel}, {tuning.what}, {target.device_kind}", flush=True)

    def say_cost(job: KernelJob, answer: dict[str, Any], is_known: bool) -> None:
        if not is_known:
            say(f"  {job.kind} {' x '.join(map(str, job.tile))}: {_cost_text(tuning, job, answer)}")

    search = OfflineSearch(compiler, log, kernel, local, target, limit, say_cost)
    costs = search.run(tuning.training)
    found = ranked_sizes(tuning, costs)
    if not found:
        rule = f"no sizes could be estimated: {(search.failures or ['none is legal'])[0]}"
        remedy = f"raise --time-limit, or see {log.path}"
        raise Unsupported("--offline", tuning.name, rule, remedy)
    sizes, _ = adjust(FlashBlockSizes(), local, kernel, target, tuning.training)
    default = seconds_of(costs, sizes, local, kernel, target)
    how = f"estimated by libtpu {compiler.versions['libtpu']}'s schedule, not run"
    how += f"; {beside_measured(target.device_kind)}"
    unset = Estimate(sizes, default) if default else None
    print("\n".join(ranking_lines(found, unset, how)))
    for one in () if kept.problem else _ties(found):
        ms = 1e3 * one.seconds.slow
        times = {"training_ms" if tuning.training else "forward_ms": ms}
        measurement = tuning.identity(tuple(one.sizes.given().items())) | {"source": ESTIMATED}
        blank = {"error": "", "forward_ms": None, "training_ms": None}
        store.add(kept.path, measurement | blank | times)
    where = f"kept as an estimate in {kept.path}; plans take it until sizes are measured; "
    best = tuple(found[0].sizes.given().items())
    print(f"  {'' if kept.problem else where}{tuning.to_set(best)}", flush=True)


def ranked_sizes(tuning: SizeTuning, costs: Costs) -> list[Estimate]:
    """Rank the sizes that fit the device, with the fused and with the separate backward."""
    local, kernel = tuning.as_computed, cast(KernelKind, tuning.kernel)
    kind, training = tuning.target.device_kind, tuning.training
    found = [
        one
        for fused in ((False, True) if kernel == "flash" and training else (training,))
        for one in ranked(costs, local, kernel, tuning.target, training, fused)
        if fits_alone(kernel, local, one.sizes, training, kind)
    ]
    return sorted(found, key=lambda one: one.seconds.slow)


def _cost_text(tuning: SizeTuning, job: KernelJob, answer: dict[str, Any]) -> str:
    """Write the cycles of a step in the call's grid, as `maxattn compile --estimate` does."""
    if not (cost := answer.get("cost")):
        return answer["failed"]
    kernel = cast(KernelKind, tuning.kernel)
    grid = step_grid(job.kind, job.tile, tuning.as_computed, kernel)
    return cycles_text(StepCost.of(cost).cycles(grid or StepGrid(1, 1, 1, 0.0)))


def _ties(found: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates whose slow end is within `TIE` of the best one's."""
    least = found[0].seconds.slow
    return [one for one in found if one.seconds.slow <= (1 + TIE) * least]


def ranking_lines(found: Sequence[Estimate], default: Estimate | None, how: str) -> list[str]:
    """Write a ranking with ties for the first place marked, and the default sizes."""
    ties = len(_ties(found))
    lines = [
        (in_ms(one.seconds), "tie" if 0 < number < ties else "", one.sizes, "")
        for number, one in enumerate(found[: max(SHOWN, ties)])
    ]
    if default is not None:
        gain = default.seconds.slow / found[0].seconds.slow
        beside = f"  (the default; the first is {gain:.2f} times as fast)"
        lines.append((in_ms(default.seconds), "", default.sizes, beside))
    table = columns([line[:2] for line in lines])
    head = f"  {how}; ranked by the slow end; a tie is less than {TIE:.0%} apart"
    pairs = zip(table, lines, strict=True)
    return [head, *(f"  {text:<26}  {line[2]}{line[3]}" for text, line in pairs)]
