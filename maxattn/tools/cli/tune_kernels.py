"""`maxattn tune` under `attention: auto`: times the kernels that can run a model's calls.

The kernels of one call are timed in turns. Times are kept after each pass of a call, and plans on
this machine use them before any other rule.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxattn._plan import Plan
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.config.load import yaml_of
from maxattn.decide import kernel_call, plan
from maxattn.errors import ConfigError
from maxattn.kernels.auto.tuned_order import in_digits, joined
from maxattn.masks import Mask
from maxattn.masks.operands import without_padding
from maxattn.measuring.columns import columns
from maxattn.sharding import MeshShape
from maxattn.target import Target
from maxattn.tools.bench.kernels import config_of
from maxattn.tools.cli.progress import progress, say_where
from maxattn.tools.model_shapes import Shape
from maxattn.tools.tune import store
from maxattn.tools.tune.candidates import KernelCandidates, kernel_candidates
from maxattn.tools.tune.kernel_times import PassTimes, time_pass
from maxattn.tuned import in_ms
from maxattn.tuned.kernels import (
    call_times,
    is_as_fast,
    key_of_kernels,
    milliseconds_of,
    settings_of,
    unmeasured_for,
    versions_text,
)

PASSES = {"forward": "forward_ms", "backward": "backward_ms"}
Record = dict[str, Any]
"""A measurement of kernels, as a JSON object of the file of measurements."""


@dataclass(frozen=True)
class KernelTuning:
    """The call whose kernels are timed; `data` is the text of a mask with arrays, else ""."""

    shape: Shape
    config: AttentionConfig
    mesh: MeshShape | dict[str, int]
    target: Target
    data: str

    def planned(self, record: Record | None = None) -> Plan:
        """Make the plan with the measured times of a record; without a record, with none."""
        times = () if record is None else (call_times(record, ""),)
        target = replace(self.target, kernel_times=times)
        return plan(self.shape.call(), self.config, dict(self.mesh), target)

    @property
    def local(self) -> Call:
        made = self.planned()
        return kernel_call(made.padded_call, made.strategy)

    def mask(self) -> Mask:
        """Return the mask with arrays of one device's batch rows and heads."""
        shape, local = self.shape, self.local
        bound = shape.mask.bind(shape.q_len, shape.kv_len, shape.batch, shape.heads)
        bound = bound if self.config.mask_padding_tokens else without_padding(bound)
        full, most = self.planned().full_mask(bound), {"B": local.batch, "N": local.heads}

        def of_device(x: Any, axes: str) -> Any:
            return x[tuple(slice(most.get(axis)) for axis in axes)]

        return jax.tree.map(of_device, full, full.leaf_axes())

    def identity(self) -> Record:
        return {
            "device_kind": self.target.device_kind,
            "versions": versions_text(self.target.packages),
            "call": key_of_kernels(self.local),
            "settings": settings_of(self.config),
            "data": self.data,
        }


class KernelOutcome(NamedTuple):
    """Effect of a call's measurement. `own` and `taken` are the kernels that `auto` takes without
    and with it; "a/b" is the forward of a and the backward of b. `before` and `now` are the ms of
    `own` and `taken`, if timed. `is_lost`: the device stopped answering.
    """

    call: str
    own: str = ""
    taken: str = ""
    before: float | None = None
    now: float | None = None
    is_lost: bool = False


def tune(
    args: argparse.Namespace, tuning: KernelTuning, kept: store.Opened | None
) -> KernelOutcome | None:
    """Time the kernels of one call, or print what would be timed."""
    local, target = tuning.local, tuning.target
    mask = "" if local.mask.is_full else f" {local.mask}"
    print(f"{tuning.shape.name}: kernels, one device's {local.shape_text}{mask}", flush=True)
    if why := unmeasured_for(local):
        print(f"  {why}")
        return None
    found = kernel_candidates(local, tuning.config, target)
    left_out = "".join(f"\n  not timed: {name}: {why}" for name, why in found.left_out.items())
    if kept is None or Target.here().untuned() != target.untuned():
        made = tuning.planned()
        print(f"  {target.device_kind} is not here, so nothing is timed or kept")
        print(f"  to be timed there: {', '.join(found.built)}{left_out}")
        print(f"  without times auto takes {made.kernel.name}: {made.because}")
        return None
    if len(found.built) < 2:
        print(f"  nothing to choose: only {', '.join(found.built)} can run the call{left_out}")
        return None
    kept.say(f"{len(found.built)} kernels")
    record, is_old, is_lost = _measured(args, tuning, found, kept.path)
    if is_lost:
        name, why = next(reversed(record["failed"].items()), ("a kernel", "it is not known which"))
        print(f"  {target.device_kind} stopped answering after {name} failed: {why}")
        print("  start the command again: that kernel is then left out")
        return KernelOutcome(tuning.shape.name, is_lost=True)
    print("\n".join(_table(record, found)) + left_out)
    if is_old:
        print("  measured before; --again measures again")
    own, taken = (tuning.planned(r).kernel.name for r in (None, record))
    its = _outcome(tuning.shape.name, record, own, taken)
    print("\n".join(_winner(its, record, tuning, not kept.problem)))
    return its


def _measured(
    args: argparse.Namespace, tuning: KernelTuning, found: KernelCandidates, path: Path
) -> tuple[Record, bool, bool]:
    """Return a measurement, whether it was kept before, and whether the device was lost."""
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
            times = PassTimes({}, {})
            if what == "forward":
                times = time_pass(built, what, local, tuning.mask())
            elif record["forward_ms"]:  # a backward begins with the output of the fastest forward
                first = tuning.planned(record).kernel.name.split("/")[0]
                times = time_pass(built, what, local, tuning.mask(), first)
        ms = {name: list(rounds) for name, rounds in times.ms.items()}
        record = record | {PASSES[what]: ms, "failed": record["failed"] | times.failed}
        store.add(path, record)
        if times.is_dead:
            return record, False, True
    return record, is_old, False


def check_kernels_are_chosen(named: str, because: str) -> None:
    """Refuse to time kernels if a setting names the kernel."""
    if named != "auto":
        rule = f"kernels are timed only for auto, and here {named} runs: {because}"
        remedy = (
            "let auto choose (attention=auto, cross_attention=auto, no flash_min_seq_length and no"
            " use_memory_efficient_attention), or leave --kernels out"
        )
        raise ConfigError("--kernels", named, rule, remedy)


# ---- what is printed -----------------------------------------------------------------------------


def _times(record: Record) -> dict[str, dict[str, float]]:
    return {
        what: {name: milliseconds_of(tuple(ms)) for name, ms in record[key].items()}
        for what, key in PASSES.items()
        if record[key]
    }


def _outcome(call: str, record: Record, own: str, taken: str) -> KernelOutcome:
    def name(kernels: str) -> str:
        first, *_, last = [*kernels.split("/")] * 2
        return joined(first, last) if record["backward_ms"] else first

    return KernelOutcome(call, name(own), name(taken), _total(record, own), _total(record, taken))


def _total(record: Record, kernels: str) -> float | None:
    """Sum the milliseconds of the timed passes of a kernel, or of a pair "a/b"."""
    first, *_, last = [*kernels.split("/")] * 2
    found = [its.get(first if what == "forward" else last) for what, its in _times(record).items()]
    return sum(x for x in found if x) if found and all(found) else None


def _table(record: Record, found: KernelCandidates) -> list[str]:
    times = _times(record)
    lines = [["kernel", *(f"{what} ms" for what in times)]]
    for name in found.built:
        ms = [its.get(name) for its in times.values()]
        lines.append([name, *(in_digits(x) if x else "-" for x in ms)])
    failed = ["", *(record["failed"].get(name, "") for name in found.built)]
    table = zip(columns(lines, 1), failed, strict=True)
    return [f"  {line}" + (f"  does not run: {why}" if why else "") for line, why in table]


def _winner(its: KernelOutcome, record: Record, tuning: KernelTuning, is_kept: bool) -> list[str]:
    if its.now is None:
        return ["  no kernel runs"]
    passes = "forward and backward" if record["backward_ms"] else "forward"
    because, role = tuning.planned().because, tuning.shape.role
    without = f"  without times auto takes {its.own}"
    if its.own == its.taken:
        without = f"  without times auto takes the same: {because}"
    elif its.before is None:
        without += ", which was not timed"
    else:
        without += f": {in_ms(its.before)}, {its.before / its.now:.2f} times as long"
    lines = [*_taken(its, record, its.now, passes), without]
    lines += ["  plans on this machine take it under attention: auto"] if is_kept else []
    # Several processes do not read measurements: for them the config must name the kernel.
    totals = {name: ms for name in record["forward_ms"] if (ms := _total(record, name))}
    if totals:
        taken = [name for name in its.taken.split("/") if name in totals]
        config = config_of(min(taken or totals, key=lambda name: totals[name]))
        if role == "cross":
            config = config.replace(attention="auto", cross_attention=config.attention)
        where = "for several processes, " if is_kept else ""
        lines.append(f"  {where}to name one kernel: {', '.join(yaml_of(config).splitlines())}")
    return lines


def _taken(its: KernelOutcome, record: Record, now: float, passes: str) -> list[str]:
    """Name the kernels that `auto` takes, and if others were faster, why it does not take them."""
    fastest = [min(ms, key=lambda name: ms[name]) for ms in _times(record).values()]
    best, ms = joined(fastest[0], fastest[-1]), f"{in_ms(now)} {passes}"
    least = _total(record, best)
    if least is None or least >= now:
        return [f"  fastest {its.taken}: {ms}"]
    own = its.taken.split("/")
    rounds = [record[PASSES[what]] for what in _times(record)]
    pairs = zip(rounds, (own[0], own[-1]), fastest, strict=False)
    alike = all(is_as_fast(tuple(all_[a]), tuple(all_[b])) for all_, a, b in pairs)
    why = "no faster than the noise" if alike else "it cannot run here"
    return [f"  auto takes {its.taken}: {ms}", f"  not {best}, {in_ms(least)}: {why}"]


def changes(outcomes: Sequence[KernelOutcome]) -> list[str]:
    """List the calls whose kernel the measurements change, with the times of both kernels."""
    changed = [its for its in outcomes if its.now and its.own != its.taken]
    lines = [f"\nchanged: {len(changed)} of {len(outcomes)} calls"]
    if changed:
        cells: list[tuple[str, ...]] = [("call", "without", "with", "ms without", "ms with")]
        for call, own, taken, before, now, _ in changed:
            cells.append((call, own, taken, *(in_digits(x) if x else "-" for x in (before, now))))
        lines += [f"  {line}" for line in columns(cells, 3)]
    return lines
