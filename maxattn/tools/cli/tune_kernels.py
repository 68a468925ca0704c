"""`maxattn tune` under `attention: auto`: times the kernels that can run a model's calls.

The first column of a row is the kernel; those of one call are timed in turns. What is measured is
kept after each pass of a call, and plans on this machine take it first.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.decide import kernel_call, plan
from maxattn.errors import ConfigError
from maxattn.masks import Mask
from maxattn.masks.operands import without_padding
from maxattn.plan import Plan
from maxattn.sharding import MeshShape
from maxattn.target import Target
from maxattn.tools.cli import tune_kernels_report as report
from maxattn.tools.cli.progress import progress, say_where
from maxattn.tools.cli.tune_kernels_report import PASSES
from maxattn.tools.model_shapes import Shape
from maxattn.tools.tune import store
from maxattn.tools.tune.candidates import KernelCandidates, kernel_candidates
from maxattn.tuned import VARIABLE, cache_path
from maxattn.tuned.kernels import (
    call_times,
    key_of_kernels,
    settings_of,
    unmeasured_for,
    versions_text,
)


@dataclass(frozen=True)
class KernelTuning:
    """Hold what the kernels are timed for.

    Args:
        shape: that the user named.
        config: the settings.
        mesh: axis sizes.
        target: the machine, without what was measured of kernels.
        data: how the user wrote a mask that has arrays; else "".
    """

    shape: Shape
    config: AttentionConfig
    mesh: MeshShape | dict[str, int]
    target: Target
    data: str

    def planned(self, record: dict[str, Any] | None = None, source: str = "") -> Plan:
        """Make the plan with what was measured, by default with nothing."""
        times = () if record is None else (call_times(record, source),)
        target = replace(self.target, kernel_times=times)
        return plan(self.shape.call(), self.config, dict(self.mesh), target)

    @property
    def local(self) -> Call:
        """What one device computes."""
        made = self.planned()
        return kernel_call(made.padded_call, made.strategy)

    def mask(self) -> Mask:
        """Return the mask with its arrays, of one device's batch rows and heads."""
        shape, local = self.shape, self.local
        bound = shape.mask.bind(shape.q_len, shape.kv_len, shape.batch, shape.heads)
        bound = bound if self.config.mask_padding_tokens else without_padding(bound)
        full, most = self.planned().full_mask(bound), {"B": local.batch, "N": local.heads}

        def of_device(x: Any, axes: str) -> Any:
            return x[tuple(slice(most.get(axis)) for axis in axes)]

        return jax.tree.map(of_device, full, full.leaf_axes())

    def identity(self) -> dict[str, Any]:
        """Return what a measurement is found by."""
        return {
            "device_kind": self.target.device_kind,
            "versions": versions_text(self.target.packages),
            "call": key_of_kernels(self.local),
            "settings": settings_of(self.config),
            "data": self.data,
        }


def tune(args: argparse.Namespace, tuning: KernelTuning) -> int:
    """Time the kernels of one call, or say what would be timed; return the exit status."""
    local = tuning.local
    mask = "" if local.mask.is_full else f" {local.mask}"
    print(f"{tuning.shape.name}: kernels, one device's {local.shape_text}{mask}", flush=True)
    if why := unmeasured_for(local):
        print(f"  {why}")
        return 0
    found = kernel_candidates(local, tuning.config, tuning.target)
    if args.target or Target.here().untuned() != tuning.target.untuned():
        _say_elsewhere(tuning, found)
    elif len(found.built) < 2:
        alone = f"{', '.join(found.built)} alone can run it"
        print(f"  nothing to choose: {alone}{report.left_out(found)}")
    else:
        return _timed(args, tuning, found)
    return 0


def _say_elsewhere(tuning: KernelTuning, found: KernelCandidates) -> None:
    made = tuning.planned()
    print(f"  {tuning.target.device_kind} is not here, so nothing is timed or kept")
    print(f"  to be timed there: {', '.join(found.built)}{report.left_out(found)}")
    print(f"  without it auto takes {made.kernel.name}: {made.because}")


# ---- on the device -------------------------------------------------------------------------------


def _timed(args: argparse.Namespace, tuning: KernelTuning, found: KernelCandidates) -> int:
    with store.writable_copy(cache_path()) as (path, problem):
        say_kept(path, "" if args.has_said_so else problem, f"{len(found.built)} kernels")
        args.has_said_so = args.has_said_so or bool(problem)
        record, is_old, is_dead = _measured(args, tuning, found, path)
        if is_dead:
            report.say_lost(record)
            return 1
        report.say_table(record, found, is_old)
        own, taken = (tuning.planned(r).kernel.name for r in (None, record))
        its = report.outcome(tuning.shape.name, record, own, taken)
        report.say_winner(its, record, tuning.local.role, not problem)
        args.outcomes.append(its)
    return 0


def say_kept(path: Path, problem: str, what: str) -> None:
    """Say where measurements are kept, or once why they are not.

    Args:
        path: the file, or a copy for this command alone.
        problem: why it cannot be written; "" where it can, or where that was said.
        what: is measured, and how many of them.
    """
    if problem:
        where = f"{cache_path()} cannot be written, so nothing is kept: {problem}"
        print(f"  {where}; set {VARIABLE} to a folder that you may write to")
    is_kept = path == cache_path()
    if aside := store.put_aside(path):
        copied = f"; a copy is kept as {aside[1].name}" if is_kept else ""
        print(f"  {cache_path()} is damaged: {aside[0]}{copied}")
    print(f"  {what}{f'; measurements in {path}' if is_kept else ''}", flush=True)


def _measured(
    args: argparse.Namespace, tuning: KernelTuning, found: KernelCandidates, path: Path
) -> tuple[dict[str, Any], bool, bool]:
    """Return a measurement, whether it was there already, and whether the device was lost.

    It is kept after each pass, so that a killed command loses one at most.
    """
    from maxattn.tools.tune.kernel_times import PassTimes, time_pass

    identity, local, is_old = tuning.identity(), tuning.local, True
    old = None if args.again else store.find(path, identity)
    record = old or identity | {"forward_ms": {}, "backward_ms": {}, "failed": {}}
    for what in ("forward",) if args.forward else PASSES:
        built = {n: k for n, k in found.built.items() if n not in record["failed"]}
        if built.keys() <= record[PASSES[what]].keys():
            continue
        if is_old:
            say_where("kernels, in turns,", tuning.target)
        is_old = False
        with progress(steps=2 * len(built) + 1):
            first = _forward_of(tuning, record) if what == "backward" else ""
            if what == "backward" and not first:
                times = PassTimes({}, {})
            else:
                times = time_pass(built, what, local, tuning.mask(), first)
        ms = {name: list(rounds) for name, rounds in times.ms.items()}
        record = record | {PASSES[what]: ms, "failed": record["failed"] | times.failed}
        store.add(path, record)
        if times.is_dead:
            return record, False, True
    return record, is_old, False


def _forward_of(tuning: KernelTuning, record: dict[str, Any]) -> str:
    """Name the kernel whose output the backward begins with; "" where none ran."""
    return tuning.planned(record).kernel.name.split("/")[0] if record["forward_ms"] else ""


def check_kernels_are_chosen(named: str, because: str) -> None:
    """Refuse to time kernels where a setting names the one that runs.

    Raises:
        ConfigError: naming it.
    """
    if named != "auto":
        rule = f"kernels are timed where auto chooses one, and here {named} runs: {because}"
        remedy = (
            "let auto choose (attention=auto, cross_attention=auto, no flash_min_seq_length and no"
            " use_memory_efficient_attention), or leave --kernels out"
        )
        raise ConfigError("--kernels", named, rule, remedy)
