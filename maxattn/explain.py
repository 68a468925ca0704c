"""What a plan looks like to a person, and as plain values. It decides nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from maxattn.call import Call

if TYPE_CHECKING:
    from maxattn.plan import Plan

INDENT = 10


def explain(plan: Plan, training: bool = True) -> str:
    """Return the plan as a few lines: asked, runs, mask, shards, blocks, moves, notes, and who was
    refused.

    Args:
        plan: what is told of.
        training: False leaves out what its backward does and sends.
    """
    lines = [_headline(plan)]
    for heading, text in _entries(plan, training):
        lines.append(f"  {heading:<{INDENT - 2}}{text}")
    return "\n".join(lines)


def _headline(plan: Plan) -> str:
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.mesh)
    return (
        f"{plan.call.role}-attention  {plan.call.shape_text}"
        + (f"   mesh {mesh}" if mesh else "")
        + f"   {plan.target.device_kind}"
    )


def _entries(plan: Plan, training: bool) -> list[tuple[str, str]]:
    local = plan.context.local_call(plan.padded_call)
    runs_with = plan.kernel if training else plan.kernel.for_inference()
    kernel = runs_with.lines(plan.context.kernel_call(local))
    if instead := plan.context.backward_line():
        kernel = kernel._replace(backward=instead)
    strategy = "" if plan.context.name == "none" else f"{plan.context.label()} x "
    runs = strategy + kernel.runs
    entries = [("asked", plan.asked), ("runs", runs), ("because", plan.because)]
    if not plan.call.mask.is_full:
        entries.append(("mask", _mask(plan.call)))
    if plan.mesh:
        entries.append(("shards", _shards(plan)))
    both = training and kernel.backward
    blocks = f"forward: {kernel.blocks}; backward: {kernel.backward}" if both else kernel.blocks
    entries += [("blocks", line) for line in blocks.splitlines()]
    moves = [("moves", str(c)) for c in plan.collectives if training or c.when == "forward"]
    entries += moves or ([("moves", "nothing")] if plan.mesh else [])
    entries += [("note", note) for note in plan.notes]
    return entries + [("not", str(reason)) for reason in plan.refused]


def _mask(call: Call) -> str:
    text = str(call.mask)
    pairs = call.mask.allowed_pairs(call.q_len, call.kv_len)
    share = pairs / (call.q_len * call.kv_len)
    at_most = "at most " if call.mask.has_data else ""
    return f"{text}, {at_most}{share:.1%} of the pairs"


def _shards(plan: Plan) -> str:
    local = plan.context.local_call(plan.padded_call)
    runs = f"{plan.context.runs} x " if plan.context.runs > 1 else ""
    parts = [f"{local.batch} of B", f"{runs}{local.q_len} queries", f"{local.heads} heads"]
    extra = [
        f"{what}: {padded - real} padded, masked"
        for what, padded, real in (
            ("queries", plan.q_len, plan.call.q_len),
            ("keys", plan.kv_len, plan.call.kv_len),
        )
        if padded > real
    ]
    return ", ".join(parts) + " each" + "".join(f"; {e}" for e in extra)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return what decides the numbers of a plan, as plain values that JSON can hold."""
    kernel = {
        "kernel": plan.kernel.name,
        **{f"kernel.{k}": v for k, v in asdict(cast(Any, plan.kernel)).items()},
    }
    values = {
        "role": plan.call.role,
        "call": plan.call.shape_text,
        "scale": plan.call.scale,
        "mask": str(plan.call.mask),
        "bias": list(plan.call.bias) if plan.call.bias else None,
        "asked": plan.asked,
        **kernel,
        "context": plan.context.name,
        "mesh": dict(plan.mesh),
        "q_len": plan.q_len,
        "kv_len": plan.kv_len,
        "kv_repeat": plan.kv_repeat,
        "target": plan.target.device_kind,
        "packages": dict(plan.target.packages),
    }
    return json.loads(json.dumps(values))
