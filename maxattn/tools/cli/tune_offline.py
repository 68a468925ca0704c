"""`maxattn tune --offline`: rank a TPU's tiles by libtpu's schedules, where no TPU is.

Every kernel that was compiled stands at once in `schedules.jsonl` beside the measurements, so a
command that was stopped goes on where it was. What is kept for plans is marked as estimated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from maxattn.block_sizes import adjust
from maxattn.block_sizes.estimated.choose import TIE, Estimate, in_ms, ranked, seconds_of
from maxattn.block_sizes.estimated.grids import not_priced
from maxattn.block_sizes.estimated.step_cost import Costs
from maxattn.block_sizes.sizes import BlockSizes, KernelKind
from maxattn.call import Call
from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.config.errors import plain
from maxattn.config.measurements import BLOCKS, ESTIMATED
from maxattn.config.numbers import finite
from maxattn.config.target_names import read_target
from maxattn.config.write import yaml_of
from maxattn.decide import kernel_call
from maxattn.devices import DEVICES
from maxattn.errors import ConfigError, Unsupported
from maxattn.kernels import computed_call
from maxattn.plan import Plan, plan
from maxattn.target import Target
from maxattn.tools.cli.inputs import Source, shapes_of
from maxattn.tools.cli.machine import mesh_of
from maxattn.tools.cli.progress import say
from maxattn.tools.compile.job import MOST_SECONDS
from maxattn.tools.estimate.kernel import core_of
from maxattn.tools.memory import fits_alone
from maxattn.tools.tune import store
from maxattn.tools.tune.kernel_job import KernelJob
from maxattn.tools.tune.offline import OfflineSearch
from maxattn.tools.tune.schedules import ScheduleCompiler, ScheduleLog
from maxattn.tuned import Sizes, cache_path, key_of, versions_of, with_sizes

SHOWN = 8  # sizes that are listed, beside those that run where nothing is set


def run(args: argparse.Namespace, source: Source) -> int:
    """Rank the tiles of each shape, and keep the fastest."""
    kind = _tpu_of(args.target)
    if not finite(args.time_limit, 0, MOST_SECONDS):
        rule = f"it is a number of seconds above 0, at most {MOST_SECONDS}"
        raise ConfigError("--time-limit", plain(args.time_limit), rule, "write --time-limit 120")
    with ScheduleCompiler(args.time_limit) as compiler, store.writable_copy(cache_path()) as kept:
        path, problem = kept
        versions = compiler.versions
        packages = tuple((name, v) for name, v in versions.items() if name != "libtpu")
        log = ScheduleLog(path.with_name("schedules.jsonl"), versions)
        if problem:
            say(f"{cache_path()} cannot be written, so nothing is kept: {problem}")
        for number, shape in enumerate(shapes_of(args, source)):
            print("\n" if number else "", end="")
            # Each shape's plan takes what was kept of those before it.
            target = Target.named(kind, packages)
            made = plan(shape.call(), source.config, mesh_of(args, source.config), target)
            for kernel in made.kernel.name.split("/"):  # one, or one a pass
                tuning = _tuning(args, source, shape.name, made, kernel)
                _tune(tuning, compiler, log, path, args.limit, not problem)
    return 0


def _tpu_of(target: str | None) -> str:
    if not target:
        remedy = "write --target v6e, or leave --offline out to time this machine"
        raise ConfigError("--offline", "no --target", "sizes are ranked for a named TPU", remedy)
    kind = read_target(target).kind
    if DEVICES[kind].platform != "tpu":
        rule = f"sizes are ranked by the schedules of a TPU's compiler, and {kind} is none"
        remedy = "name one of v4, v5e, v5p, v6e and v7x, or leave --offline out"
        raise Unsupported("--offline", kind, rule, remedy)
    core_of(DEVICES[kind])
    return kind


@dataclass(frozen=True)
class OfflineTuning:
    """Hold what is ranked: the shape's name, kernel, one device's call, TPU, and whether with the
    backward.
    """

    name: str
    kernel: KernelKind
    local: Call
    target: Target
    training: bool

    @property
    def default(self) -> BlockSizes:
        """The sizes that the rules fill in."""
        asked = FlashBlockSizes()
        return adjust(asked, self.local, self.kernel, self.target, self.training)[0]

    def ranked(self, costs: Costs) -> list[Estimate]:
        """Rank the sizes that fit the device, with either backward."""
        what = costs, self.local, self.kernel, self.target, self.training
        ways = (False, True) if self.kernel == "flash" and self.training else (self.training,)
        kind = self.target.device_kind
        found = [
            one
            for fused in ways
            for one in ranked(*what, fused)
            if fits_alone(self.kernel, self.local, one.sizes, self.training, kind)
        ]
        return sorted(found, key=lambda one: one.seconds.slow)

    def measurement(self, one: Estimate) -> dict[str, Any]:
        """Write an estimate as the cache keeps it."""
        slow, training = 1e3 * one.seconds.slow, self.training
        return {
            "device_kind": self.target.device_kind,
            "versions": versions_of(self.kernel, self.target.packages),
            "kernel": self.kernel,
            "call": key_of(self.local),
            "sizes": one.sizes.given(),
            "error": "",
            "source": ESTIMATED,
            "forward_ms": None if training else slow,
            "training_ms": slow if training else None,
        }


def _tuning(
    args: argparse.Namespace, source: Source, name: str, made: Plan, kernel: str
) -> OfflineTuning:
    call = kernel_call(made.padded_call, made.strategy)
    local = computed_call(kernel, call, "tpu")
    if kernel not in BLOCKS:
        rule = f"{kernel} runs, and the kernels with tiles on TPUs are {' and '.join(BLOCKS)}"
        raise Unsupported("--offline", name, rule, "write attention=flash")
    if why := not_priced(call):
        rule = f"tiles are ranked by schedules: {why}"
        raise Unsupported("--offline", f"mask {local.mask}", rule, "leave the mask out")
    if source.config.float32_qk_product:
        local = local.derived(dtype="float32")
    return OfflineTuning(name, cast(KernelKind, kernel), local, made.target, not args.forward)


def _tune(
    tuning: OfflineTuning,
    compiler: ScheduleCompiler,
    log: ScheduleLog,
    path: Path,
    limit: int,
    is_kept: bool,
) -> None:
    local, target = tuning.local, tuning.target
    where = f"one device's {local.role}-attention {local.shape_text}, {target.device_kind}"
    print(f"{tuning.name}: {tuning.kernel}, {where}", flush=True)
    search = OfflineSearch(compiler, log, tuning.kernel, local, target, limit, _say_answer)
    costs = search.run(tuning.training)
    found = tuning.ranked(costs)
    how = f"estimated by libtpu {compiler.versions['libtpu']}'s schedule, not run"
    if not found:
        rule = f"no sizes could be estimated: {(search.failures or ['none is legal'])[0]}"
        remedy = f"raise --time-limit, or see {log.path}"
        raise Unsupported("--offline", tuning.name, rule, remedy)
    default = seconds_of(costs, tuning.default, local, tuning.kernel, target)
    unset = Estimate(tuning.default, default) if default else None
    print("\n".join(ranking_lines(found, unset, how)))
    for one in _ties(found) if is_kept else ():
        store.add(path, tuning.measurement(one))
    kept = f"kept as estimated in {path}: plans take it until it is measured; " if is_kept else ""
    sizes = tuple(found[0].sizes.given().items())
    print(f"  {kept}to set it:\n{yaml_to_set(tuning.kernel, sizes)}", flush=True)


def _say_answer(job: KernelJob, answer: dict[str, Any], is_known: bool) -> None:
    if is_known:
        return
    tile = " x ".join(map(str, job.tile))
    cost = answer.get("cost")
    words = f"{cost[0] + cost[2][0]:,} bundles a step" if cost else answer["failed"]
    say(f"  {job.kind} {tile}: {words}")


def yaml_to_set(kernel: str, sizes: Sizes) -> str:
    """Write the lines to paste, indented."""
    lines = yaml_of(with_sizes(AttentionConfig(), kernel, sizes)).splitlines()
    return "\n".join(f"    {line}" for line in lines)


def _ties(found: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates that the best one is not surely faster than."""
    least = found[0].seconds.slow
    return [one for one in found if one.seconds.slow <= (1 + TIE) * least]


def ranking_lines(found: Sequence[Estimate], default: Estimate | None, how: str) -> list[str]:
    """Write a ranking, the ties for the first place marked, and what runs where nothing is set."""
    ties = len(_ties(found))
    lines = [f"  {how}; the slow end ranks, and less than {TIE:.0%} apart is a tie"]
    for number, one in enumerate(found[: max(SHOWN, ties)]):
        mark = "tie" if 0 < number < ties else ""
        lines.append(f"  {in_ms(one.seconds):>18}  {mark:3}  {one.sizes}")
    if default is not None:
        gain = default.seconds.slow / found[0].seconds.slow
        beside = f"where nothing is set; the first is {gain:.2f} times as fast"
        lines.append(f"  {in_ms(default.seconds):>18}       {default.sizes}  ({beside})")
    return lines
