"""What a plan looks like to a person, and as plain values. It decides nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from math import floor, log10
from typing import TYPE_CHECKING, Any, cast

from maxattn.call import Call
from maxattn.kernels.base import Kernel
from maxattn.masks import Mask

if TYPE_CHECKING:
    from maxattn.kernels.base import Lines
    from maxattn.plan import Plan

INDENT = 10


def explain(plan: Plan, training: bool = True, why: bool = False) -> str:
    """Return the plan as a few lines: what was asked, what runs, moves and was refused.

    Args:
        plan: what is told of.
        training: False leaves out what its backward does and sends.
        why: print what `context_parallel: auto` added up for every strategy.
    """
    entries = _entries(plan, training, why)
    lines = (f"  {heading:<{INDENT - 2}}{text}" for heading, text in entries)
    return "\n".join([_headline(plan), *lines])


def _headline(plan: Plan) -> str:
    sizes = " ".join(f"{axis}={size}" for axis, size in plan.mesh)
    call, mesh = plan.call, f"   mesh {sizes}" if sizes else ""
    return f"{call.role}-attention  {call.shape_text}{mesh}   {plan.target.device_kind}"


def _entries(plan: Plan, training: bool, why: bool) -> list[tuple[str, str]]:
    kernel = _lines_of_kernel(plan, training)
    strategy = "" if plan.strategy.name == "none" else f"{plan.strategy.label()} x "
    entries = [("asked", plan.asked), ("runs", strategy + kernel.runs), ("because", plan.because)]
    if not plan.call.mask.is_full:
        entries.append(("mask", _mask(plan.call)))
    if plan.mesh:
        entries.append(("shards", _shards(plan)))
    entries += [("blocks", line) for line in _blocks(kernel, training).splitlines()]
    entries += _moves(plan, training)
    entries += [("note", note) for note in (*_arithmetic(plan, why), *plan.notes)]
    return entries + [("not", str(reason)) for reason in plan.refused]


def _lines_of_kernel(plan: Plan, training: bool) -> Lines:
    local = plan.strategy.local_call(plan.padded_call)
    runs_with = plan.kernel if training else plan.kernel.for_inference()
    call = plan.strategy.kernel_call(local)
    kernel = runs_with.lines(call)
    instead = plan.strategy.backward_line(plan.kernel, call.derived(bias=plan.call.bias))
    return kernel._replace(backward=instead) if instead else kernel


def _blocks(kernel: Lines, training: bool) -> str:
    if not (training and kernel.backward):
        return kernel.blocks
    return f"forward: {kernel.blocks}; backward: {kernel.backward}"


def _moves(plan: Plan, training: bool) -> list[tuple[str, str]]:
    moves = [("moves", str(c)) for c in plan.collectives if training or c.when == "forward"]
    return moves or ([("moves", "nothing")] if plan.mesh else [])


def _arithmetic(plan: Plan, why: bool) -> tuple[str, ...]:
    if why:
        return plan.sums
    return (f"{plan.arithmetic} (explain --why prints all)",) if plan.arithmetic else ()


def _mask(call: Call) -> str:
    share = call.mask.allowed_pairs(call.q_len, call.kv_len) / (call.q_len * call.kv_len)
    at_most = "at most " if call.mask.has_data else ""
    return f"{call.mask}, {at_most}{_percent(share)} of the pairs"


def _percent(share: float) -> str:
    """Write a share with three digits, as 28.6%."""
    value = 100 * share
    decimals = max(0, 2 - floor(log10(value))) if value else 0
    return f"{value:.{decimals}f}%"


def _shards(plan: Plan) -> str:
    local, call = plan.strategy.local_call(plan.padded_call), plan.call
    chunks = f"{plan.strategy.chunks_per_rank} x " if plan.strategy.chunks_per_rank > 1 else ""
    parts = f"{local.batch} of B, {chunks}{local.q_len} queries, {local.heads} heads each"
    queries = _padding("queries", plan.q_len - call.q_len)
    return parts + queries + _padding("keys", plan.kv_len - call.kv_len)


def _padding(what: str, added: int) -> str:
    return f"; {what}: {added} padded, masked" if added else ""


def _fields(kernel: Kernel) -> dict[str, Any]:
    """Return what was decided of a kernel, and of one that hands it its operands."""
    own = {f.name: _plain(getattr(kernel, f.name)) for f in fields(cast(Any, kernel))}
    if kernel.computes is kernel:
        return own
    inner = own.pop("inner")
    return inner | own


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: masks as they are written."""
    if isinstance(value, Mask):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return _fields(value) if isinstance(value, Kernel) else asdict(value)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return what decides the numbers of a plan, as plain values that JSON can hold."""
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
