"""Estimate the time of a compiled program: its kernels, and XLA's own operations.

libtpu takes long to write the schedules of a whole transformer block. So a block's attention is
priced by schedules that ship with maxattn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

from maxattn._plan import Plan
from maxattn.block_sizes.estimated.choose import seconds_of
from maxattn.block_sizes.estimated.few_keys import few_keys_seconds
from maxattn.block_sizes.estimated.step_cost import Seconds
from maxattn.block_sizes.estimated.table import shipped_costs
from maxattn.block_sizes.few_keys import FEW_KEYS
from maxattn.block_sizes.sizes import FORWARD, BlockSizes, KernelKind
from maxattn.call import Call
from maxattn.decide import kernel_call
from maxattn.devices import Device
from maxattn.errors import Unsupported
from maxattn.jax_private.versions import LIBTPU
from maxattn.kernels import computed_call
from maxattn.kernels.base import Kernel
from maxattn.kernels.composed.pair import kernels_of
from maxattn.kernels.splash.kernel import Splash
from maxattn.sharding import ways
from maxattn.target import Target
from maxattn.tools.compile.hlo import HloProgram
from maxattn.tools.estimate.bundles import unknown
from maxattn.tools.estimate.kernel import KernelDump, KernelEstimate, KernelTiles, core_of
from maxattn.tools.estimate.xla import ROW_KERNELS, WORDS, operations

LONGEST = 3  # most of XLA's own operations that an estimate names for each kind
RECOMPUTED = "FULL", "MATMUL_WITHOUT_BATCH", "OFFLOAD_MATMUL_WITHOUT_BATCH"
"""Policies of rematerialisation under which attention runs a second time."""
_PALLAS = 'custom_call_target="tpu_custom_call"'
_BODY = re.compile(r'"body":"([^"]*)"')
_BUNDLES = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_SLOTS = re.compile(r"\d+-(.+)-\d+-final_hlo-static-per-bundle-utilization\.txt")


def estimate_of(
    text: str,
    folder: Path,
    device: Device,
    tiles_of: Callable[[KernelDump], KernelTiles | None],
    forward_flops: float = 0.0,
) -> dict[str, Any]:
    """Estimate the time of a compiled program from `compiled.as_text()` and libtpu's dumps.

    Args:
        text, folder, device: the program, the folder of the dumps, and where it would run.
        tiles_of: counts the tiles that a kernel visits; None if they are not known.
        forward_flops: FLOPs of a program without a plan; used if it has a single kernel.

    Returns:
        JSON values: `how` (the source of the numbers, in words), `libtpu` (its version), `kernels`
        (the fields of each `KernelEstimate`), and of XLA's own operations `xla_seconds` (the sum)
        and `xla`: for each kind its seconds, FLOPs, bytes, seconds by XLA's own cycles, how many
        operations have no such cycles, and name, jax's name and seconds of the longest.
    """
    version = metadata.version("libtpu")
    kernels = list[KernelEstimate]()
    dumps, program = Dumps.of(folder, version), HloProgram.read(text)
    for call in pallas_calls(program):
        if call.name.startswith(ROW_KERNELS):
            continue  # these wait for HBM: `_xla` has them
        dump = KernelDump.read(call.name, *dumps.texts(call.twins), device, version)
        kernels.append(dump.estimate(tiles_of(dump), call.times))
    if forward_flops and len(kernels) == 1:
        kernels = [kernels[0]._replace(flops=forward_flops / kernels[0].calls)]
    return _how(version) | {"kernels": [k._asdict() for k in kernels]} | _xla(program, device)


def _how(version: str) -> dict[str, str]:
    tested = "" if LIBTPU.hold(version) else f" (tested: {LIBTPU})"
    return {"how": f"estimated by libtpu {version}'s schedule{tested}, not run", "libtpu": version}


def _xla(program: HloProgram, device: Device) -> dict[str, Any]:
    clock, every = core_of(device).clock, list(operations(program, device))
    kinds = []
    for kind in WORDS:
        of_kind = [one for one in every if one.kind == kind]
        longest = sorted(of_kind, key=lambda one: -one.times * one.seconds)[:LONGEST]
        kinds.append({
            "kind": kind,
            "seconds": sum(one.times * one.seconds for one in of_kind),
            "flops": sum(one.times * one.flops for one in of_kind),
            "bytes": sum(one.times * one.moved for one in of_kind),
            "by_cycles": sum(one.times * (one.cycles or 0) for one in of_kind) / clock,
            "without_cycles": sum(one.cycles is None for one in of_kind),
            "longest": [(one.name, one.what, one.times * one.seconds) for one in longest],
        })  # fmt: skip
    return {"xla_seconds": sum(one["seconds"] for one in kinds), "xla": kinds}


class PallasCall(NamedTuple):
    """One call of a kernel, how often it runs, and all calls of it; libtpu dumps one of these."""

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


# ---- a transformer block -------------------------------------------------------------------------


class PricedPass(NamedTuple):
    """A pass of self- or cross-attention on one device: calls in a block, and seconds of a call."""

    name: str
    calls: int
    seconds: Seconds


def block_estimate(
    text: str, device: Device, plans: tuple[Plan, Plan], training: bool, policy: str
) -> dict[str, Any]:
    """Estimate the time of a compiled transformer block with these plans, of self and cross."""
    of_self, of_cross = plans
    passes = attention_passes(of_self, training, policy)
    if not passes:
        rule = f"maxattn ships no schedules of {of_self.kernel.name} for this call"
        remedy = "set attention_kernel=flash or tpu_flash, or leave --block out"
        raise Unsupported("estimate", of_self.call.shape_text, rule, remedy)
    passes += attention_passes(of_cross, training, policy)
    kernels = {"kernels": [], "attention": [one._asdict() for one in passes]}
    return _how(metadata.version("libtpu")) | kernels | _xla(HloProgram.read(text), device)


def attention_passes(plan: Plan, training: bool, policy: str) -> tuple[PricedPass, ...]:
    """Price a plan's kernels by the schedules that ship; () if these do not cover the call."""
    local, target = kernel_call(plan.padded_call, plan.strategy), plan.target
    forward, backward = (
        _priced(kernel, computed_call(kernel.name, local, target.platform), target, training)
        for kernel in kernels_of(plan.kernel)
    )
    # Kernel calls on one device: a ring makes one for each hop.
    padded, devices = plan.padded_call, prod(ways(axis, plan.strategy.shape) for axis in "BTN")
    hops = _pairs(padded) // (devices * _pairs(local))
    if forward is None or backward is None or (hops > 1 and not plan.call.mask.is_full):
        return ()
    runs, role = 1 + (training and policy in RECOMPUTED), plan.call.role
    found = PricedPass(f"{role}-attention's forward", hops * runs, forward[0])
    if not training:
        return (found,)
    return found, PricedPass(f"{role}-attention's backward", hops, backward[1])


def _priced(
    kernel: Kernel, local: Call, target: Target, training: bool
) -> tuple[Seconds, Seconds] | None:
    if kernel.name == FEW_KEYS:
        found = few_keys_seconds(local, target)
        return found and (found.forward, found.backward)
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
