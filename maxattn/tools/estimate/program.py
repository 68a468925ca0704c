"""Estimate the time of a compiled program: its kernels, and XLA's own operations.

libtpu takes long to write the schedules of a whole transformer block. So a block's self-attention
is priced by schedules that ship with maxattn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

from maxattn.block_sizes.estimated.choose import seconds_of
from maxattn.block_sizes.estimated.step_cost import Seconds
from maxattn.block_sizes.estimated.table import shipped_costs
from maxattn.block_sizes.sizes import FORWARD, BlockSizes, KernelKind
from maxattn.call import Call
from maxattn.decide import kernel_call
from maxattn.devices import Device
from maxattn.errors import Unsupported
from maxattn.kernels import Kernel, computed_call
from maxattn.kernels.composed.pair import kernels_of
from maxattn.kernels.splash.kernel import Splash
from maxattn.plan import Plan
from maxattn.sharding import ways
from maxattn.target import Target
from maxattn.tools.compile.hlo import HloProgram
from maxattn.tools.estimate.bundles import unknown
from maxattn.tools.estimate.kernel import KernelDump, KernelEstimate, KernelTiles, core_of

NOT_COUNTED = 2**63 - 1  # libtpu's cycles for an operation without an estimate
LONGEST = 3  # most of XLA's own operations that an estimate names
RECOMPUTED = "FULL", "MATMUL_WITHOUT_BATCH", "OFFLOAD_MATMUL_WITHOUT_BATCH"
"""Policies of rematerialisation under which attention runs a second time."""
_PALLAS = 'custom_call_target="tpu_custom_call"'
_BODY = re.compile(r'"body":"([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BUNDLES = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_SLOTS = re.compile(r"\d+-(.+)-\d+-final_hlo-static-per-bundle-utilization\.txt")


def dump_flags(folder: Path) -> str:
    """Return libtpu's flags to write the final bundles of all compiled kernels into a folder."""
    final = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
    # Without the category libtpu also writes bundles before register allocation.
    return f"--xla_jf_dump_to={folder} {final} --xla_jf_dump_category_filter=codegen"


def estimate_of(
    text: str,
    folder: Path,
    device: Device,
    tiles_of: Callable[[KernelDump], KernelTiles | None],
    forward_flops: float = 0.0,
) -> dict[str, Any]:
    """Estimate the time of a compiled program.

    Args:
        text: `compiled.as_text()`.
        folder: where libtpu wrote its dumps.
        device: the device that the program is compiled for.
        tiles_of: counts the tiles that a kernel visits; None if they are not known.
        forward_flops: FLOPs of a program without a plan; used if it has a single kernel.

    Returns:
        JSON values: `how` (the source of the numbers, in words), `libtpu` (its version), `kernels`
        (the fields of each `KernelEstimate`), and of XLA's own operations `xla_seconds` (the sum),
        `xla_longest` (names and seconds) and `xla_unknown` (names of operations without a time).
    """
    version = metadata.version("libtpu")
    kernels = list[KernelEstimate]()
    dumps = Dumps.of(folder, version)
    for call in pallas_calls(HloProgram.read(text)):
        dump = KernelDump.read(call.name, *dumps.texts(call.twins), device, version)
        kernels.append(dump.estimate(tiles_of(dump), call.times))
    if forward_flops and len(kernels) == 1:
        kernels = [kernels[0]._replace(flops=forward_flops / kernels[0].calls)]
    return _how(version) | {"kernels": [k._asdict() for k in kernels]} | _xla(text, device)


def _how(version: str) -> dict[str, str]:
    return {"how": f"estimated by libtpu {version}'s schedule, not run", "libtpu": version}


def _xla(text: str, device: Device) -> dict[str, Any]:
    core = core_of(device)
    every = sorted(_xla_cycles(HloProgram.read(text)), key=lambda pair: -pair[1])
    own = [pair for pair in every if pair[1] < NOT_COUNTED]
    return {
        "xla_seconds": sum(cycles for _, cycles in own) / core.clock,
        "xla_longest": [(name, cycles / core.clock) for name, cycles in own[:LONGEST]],
        "xla_unknown": [name for name, cycles in every if cycles >= NOT_COUNTED],
    }


class PallasCall(NamedTuple):
    """One call of a Pallas kernel, and how often the program runs it.

    `twins` are all calls of the same kernel; libtpu writes the schedule of one call.
    """

    name: str
    times: int
    twins: tuple[str, ...]


def pallas_calls(program: HloProgram) -> Iterator[PallasCall]:
    """Yield a program's calls of Pallas kernels."""
    found = [
        (one.name, program.times(name), _BODY.search(one.rest))
        for name, body in program.computations.items()
        for one in body
        if one.opcode == "custom-call" and _PALLAS in one.rest
    ]
    kernels = {name: body.group(1) if body else name for name, _, body in found}
    for name, times, _ in found:
        others = (other for other, body in kernels.items() if body == kernels[name])
        yield PallasCall(name, times, (name, *(other for other in others if other != name)))


@dataclass(frozen=True)
class Dumps:
    """The last dumps that libtpu wrote for each HLO instruction, and libtpu's version."""

    bundles: Mapping[str, Path]
    slots: Mapping[str, Path]
    libtpu: str

    @staticmethod
    def of(folder: Path, libtpu: str) -> Dumps:
        """Find the dumps in a folder."""
        paths = sorted(folder.glob("*.txt"))
        bundles, slots = (
            {found.group(1): path for path in paths if (found := form.fullmatch(path.name))}
            for form in (_BUNDLES, _SLOTS)
        )
        return Dumps(bundles, slots, libtpu)

    def texts(self, names: tuple[str, ...]) -> tuple[str, str]:
        """Return both dumps, bundles and slots, of the first kernel in `names` that has them."""
        for name in names:
            if name in self.bundles and name in self.slots:
                bundles, slots = (
                    files[name].read_text(encoding="utf-8", errors="replace")
                    for files in (self.bundles, self.slots)
                )
                return bundles, slots
        rule = f"it has no file ...-final_bundles.txt for the kernel {names[0]}"
        raise unknown(f"libtpu {self.libtpu}'s dump", rule)


def _xla_cycles(program: HloProgram) -> Iterator[tuple[str, int]]:
    """Yield the name and the estimated cycles of each operation of XLA's own.

    A fusion counts as one operation, and a loop's operations as often as they run.
    """
    every = [i for body in program.computations.values() for i in body]
    fused = {name for i in every if i.opcode == "fusion" for name in i.called}
    for name, body in program.computations.items():
        for one in body if name not in fused else ():
            if found := _CYCLES.search(one.rest):
                yield one.name, program.times(name) * int(found.group(1))


# ---- a transformer block -------------------------------------------------------------------------


class PricedPass(NamedTuple):
    """A pass of self-attention on one device: its calls in a block, and seconds of a call."""

    name: str
    calls: int
    seconds: Seconds


def block_estimate(
    text: str, device: Device, plan: Plan, training: bool, policy: str
) -> dict[str, Any]:
    """Estimate the time of a compiled transformer block."""
    passes = [one._asdict() for one in attention_passes(plan, training, policy)]
    return (
        _how(metadata.version("libtpu")) | {"kernels": [], "attention": passes} | _xla(text, device)
    )


def attention_passes(plan: Plan, training: bool, policy: str) -> tuple[PricedPass, ...]:
    """Price a plan's self-attention by the schedules that ship with maxattn."""
    local, target = kernel_call(plan.padded_call, plan.strategy), plan.target
    forward, backward = (
        _priced(kernel, computed_call(kernel.name, local, target.platform), target, training)
        for kernel in kernels_of(plan.kernel)
    )
    # Kernel calls on one device: a ring makes one for each hop.
    padded, devices = plan.padded_call, prod(ways(axis, plan.strategy.shape) for axis in "BTN")
    hops = _pairs(padded) // (devices * _pairs(local))
    if forward is None or backward is None or (hops > 1 and not plan.call.mask.is_full):
        rule = f"maxattn ships no schedules of {plan.kernel.name} for this call"
        remedy = "set attention_kernel=flash or tpu_flash, or leave --block out"
        raise Unsupported("estimate", plan.call.shape_text, rule, remedy)
    runs = 1 + (training and policy in RECOMPUTED)
    found = PricedPass("forward", hops * runs, forward[0])
    return (found, PricedPass("backward", hops, backward[1])) if training else (found,)


def _priced(
    kernel: Kernel, local: Call, target: Target, training: bool
) -> tuple[Seconds, Seconds] | None:
    """Price a forward and a backward (0 in inference); None if no shipped schedule fits."""
    kernel = kernel.computes if training else kernel.computes.for_inference()
    if not isinstance(kernel, Splash):
        return None
    sizes, name = kernel.blocks, cast(KernelKind, kernel.name)
    costs = shipped_costs(target.device_kind, name, local.head_dim, local.dtype)
    part = sizes.part(FORWARD)
    assert part is not None, sizes
    q, kv, compute = part
    forward = seconds_of(costs, BlockSizes(q, kv, compute), local, name, target)
    both = seconds_of(costs, sizes, local, name, target)
    if forward is None or both is None:
        return None
    return forward, both.plus(-forward.fast, -forward.slow)


def _pairs(call: Call) -> int:
    return call.batch * call.heads * call.q_len * call.kv_len
