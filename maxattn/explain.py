"""Write a plan as text for a person, or as plain values; this file makes no decisions."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from math import floor, log10
from typing import TYPE_CHECKING, Any, cast

from maxattn.call import Call
from maxattn.kernels.base import Kernel
from maxattn.masks import Mask

if TYPE_CHECKING:
    from maxattn._plan import Plan
    from maxattn.kernels.base import Lines

INDENT = 10


def explain(plan: Plan, training: bool = True, why: bool = False) -> str:
    """Return a plan as a few lines of text, with its backward if `training`.

    If `why`, the text has the time and memory of all strategies that `auto` compared.
    """
    sizes = " ".join(f"{axis}={size}" for axis, size in plan.mesh)
    call, mesh = plan.call, f"   mesh {sizes}" if sizes else ""
    headline = f"{call.role}-attention  {call.shape_text}{mesh}   {plan.target.device_kind}"
    entries = _entries(plan, training, why)
    return "\n".join([headline, *(f"  {name:<{INDENT - 2}}{text}" for name, text in entries)])


def _entries(plan: Plan, training: bool, why: bool) -> list[tuple[str, str]]:
    kernel = _lines_of_kernel(plan, training)
    strategy = "" if plan.strategy.name == "none" else f"{plan.strategy.label()} x "
    entries = [("asked", plan.asked), ("runs", strategy + kernel.runs), ("because", plan.because)]
    if not plan.call.mask.is_full:
        entries.append(("mask", _mask(plan.call)))
    if plan.mesh:
        entries.append(("shards", _shards(plan)))
    blocks = kernel.blocks
    if training and kernel.backward:
        blocks = f"forward: {kernel.blocks}; backward: {kernel.backward}"
    entries += [("blocks", line) for line in blocks.splitlines()]
    moves = [str(c) for c in plan.collectives if training or c.when == "forward"]
    entries += [("moves", text) for text in moves or ["nothing"] * bool(plan.mesh)]
    sums = plan.sums
    if not why:
        sums = [f"{plan.arithmetic} (explain --why prints all)"] if plan.arithmetic else []
    entries += [("note", note) for note in (*sums, *plan.notes)]
    return entries + [("refused", str(reason)) for reason in plan.refused]


def _lines_of_kernel(plan: Plan, training: bool) -> Lines:
    local = plan.strategy.local_call(plan.padded_call)
    runs_with = plan.kernel if training else plan.kernel.for_inference()
    call = plan.strategy.kernel_call(local)
    kernel = runs_with.lines(call)
    instead = plan.strategy.backward_line(plan.kernel, call.derived(bias=plan.call.bias))
    return kernel._replace(backward=instead) if instead else kernel


def _mask(call: Call) -> str:
    share = call.mask.allowed_pairs(call.q_len, call.kv_len) / (call.q_len * call.kv_len)
    at_most, percent = "at most " if call.mask.has_data else "", 100 * share
    decimals = max(0, 2 - floor(log10(percent))) if percent else 0  # three digits, as 28.6%
    return f"{call.mask}, {at_most}{percent:.{decimals}f}% of the pairs"


def _shards(plan: Plan) -> str:
    local, call = plan.strategy.local_call(plan.padded_call), plan.call
    chunks = f"{plan.strategy.chunks_per_rank} x " if plan.strategy.chunks_per_rank > 1 else ""
    share = f"batch {local.batch}, {chunks}{local.q_len} queries, {local.heads} heads"
    padding = {"queries": plan.q_len - call.q_len, "keys": plan.kv_len - call.kv_len}
    added = "".join(f"; {n} {what} are padding, masked" for what, n in padding.items() if n)
    return f"{share} on each device{added}"


def _fields(kernel: Kernel) -> dict[str, Any]:
    """Return a kernel's fields, with its inner kernel's if the kernel only prepares operands."""
    own = {f.name: _plain(getattr(kernel, f.name)) for f in fields(cast(Any, kernel))}
    if kernel.computes is kernel:
        return own
    inner = own.pop("inner")
    return inner | own


def _plain(value: Any) -> Any:
    """Convert a value for JSON; a mask becomes its text."""
    if isinstance(value, Mask):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return _fields(value) if isinstance(value, Kernel) else asdict(value)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the values of a plan that determine its results, for JSON."""
    decided = {f"kernel.{key}": value for key, value in _fields(plan.kernel).items()}
    kernel = {"kernel": plan.kernel.name, **decided}
    values = {
        "role": plan.call.role,
        "call": plan.call.shape_text,
        "scale": plan.call.scale,
        "mask": str(plan.call.mask),
        "bias": list(plan.call.bias) if plan.call.bias else None,
        "bias_dtype": plan.call.bias_dtype,
        "asked": plan.asked,
        **kernel,
        "strategy": plan.strategy.name,
        "mesh": dict(plan.mesh),
        "q_len": plan.q_len,
        "kv_len": plan.kv_len,
        "kv_repeat": plan.kv_repeat,
        "target": plan.target.device_kind,
        "packages": dict(plan.target.packages),
    }
    return json.loads(json.dumps(values))
