"""A block of a transformer, priced: XLA's own operations by the compiled program, and
self-attention by the schedules that ship.

libtpu takes long to write the schedules of a whole block, so none is written.
"""

from __future__ import annotations

from importlib import metadata
from math import prod
from typing import Any, NamedTuple, cast

from maxattn.block_sizes.estimated.choose import how_estimated, seconds_of
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
from maxattn.tools.estimate.program import how_of, xla_of

RECOMPUTED = "FULL", "MATMUL_WITHOUT_BATCH", "OFFLOAD_MATMUL_WITHOUT_BATCH"
"""Policies of rematerialisation under which attention runs a second time."""


class PricedPass(NamedTuple):
    """Hold "forward" or "backward" of self-attention on one device: calls of a block, seconds."""

    name: str
    calls: int
    seconds: Seconds


def block_estimate(
    text: str, device: Device, plan: Plan, training: bool, policy: str
) -> dict[str, Any]:
    """Price a compiled block.

    Args:
        text: `compiled.as_text()`.
        device: what it is for.
        plan: of its self-attention.
        training: forward and backward.
        policy: the config's `remat_policy`.
    """
    passes = [one._asdict() for one in attention_passes(plan, training, policy)]
    how = how_of(metadata.version("libtpu"))
    return how | {"kernels": [], "attention": passes} | xla_of(text, device)


def attention_passes(plan: Plan, training: bool, policy: str) -> tuple[PricedPass, ...]:
    """Price self-attention by the schedules that ship, with the sizes of a plan."""
    local, target = kernel_call(plan.padded_call, plan.strategy), plan.target
    forward, backward = (
        _priced(kernel, computed_call(kernel.name, local, target.platform), target, training)
        for kernel in kernels_of(plan.kernel)
    )
    # The calls in which a device computes its pairs: a ring has one for each hop.
    padded, devices = plan.padded_call, prod(ways(axis, plan.strategy.shape) for axis in "BTN")
    hops = _pairs(padded) // (devices * _pairs(local))
    if forward is None or backward is None or (hops > 1 and not plan.call.mask.is_full):
        rule = f"{plan.kernel.name} has no schedules that ship for this call ({how_estimated()})"
        remedy = "name attention_kernel=flash or tpu_flash, or leave --block out"
        raise Unsupported("estimate", plan.call.shape_text, rule, remedy)
    runs = 1 + (training and policy in RECOMPUTED)
    found = PricedPass("forward", hops * runs, forward[0])
    return (found, PricedPass("backward", hops, backward[1])) if training else (found,)


def _priced(
    kernel: Kernel, local: Call, target: Target, training: bool
) -> tuple[Seconds, Seconds] | None:
    """Price a forward and a backward, which takes no time in inference; None if none fit."""
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
