"""Compare kernels on a marked call: errors in the program, times and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn._attention import run
from maxattn._plan import Plan
from maxattn.auditing.measures import AuditSample, relative_error, sampled
from maxattn.decide import kernel_call
from maxattn.errors import InputError, brief, did_you_mean
from maxattn.jax_private.observed import MarkedCall
from maxattn.kernels import KERNELS, build, refusal, scores_of
from maxattn.kernels.table import TABLE
from maxattn.masks import Mask
from maxattn.measuring.passes import random_inputs
from maxattn.measuring.timing import TimedFunction, measure

MOST_SCORES = 1e9  # 4 GB in float32, several times
LARGE = "left out: its scores take too much memory; name it to include it"


class Candidate(NamedTuple):
    """A kernel for a call: the plan with that kernel, or the reason why it is left out."""

    name: str
    plan: Plan | None
    note: str = ""


def candidates(call: MarkedCall, named: Sequence[str] | None) -> list[Candidate]:
    """Return the kernels to compare for a call, by default all of this platform."""
    if isinstance(named, str):
        rule = "it must be a list of kernels' names"
        raise InputError("kernels", brief(named), rule, f"give kernels=[{named!r}]")
    for name in named or ():
        if name not in KERNELS:
            remedy = did_you_mean(name, KERNELS) or "write one of these names"
            rule = f"it must be one of {', '.join(KERNELS)}"
            raise InputError("kernels", brief(name), rule, remedy)
    here, rows = call.plan.target.platform, TABLE
    of_here = (x for x in KERNELS if x not in rows or here in rows[x].platforms)
    names = of_here if named is None else named
    found = [_candidate(call, name, named is not None) for name in names]
    return [each for each in found if each is not None]


def _candidate(call: MarkedCall, name: str, is_named: bool) -> Candidate | None:
    """Return a kernel to compare; None if a CPU interprets it, unless it is named."""
    plan = call.plan
    if name == plan.kernel.name:
        return Candidate(name, plan)
    local = kernel_call(plan.padded_call, plan.strategy)
    reason = refusal(name, local, plan.target)
    if reason is not None:
        return Candidate(name, None, reason.rule)
    kernel = build(name, local, call.config, plan.target)
    if not is_named and getattr(kernel.computes, "interpret", False):
        return None
    if not is_named and name == "dot_product" and scores_of(local) > MOST_SCORES:
        return Candidate(name, None, LARGE)
    return Candidate(name, replace(plan, kernel=kernel))


def errors_of(
    call: MarkedCall, operands: Any, sample: AuditSample, kernels: Sequence[Candidate]
) -> dict[str, Float[Array, " N"]]:
    """Return each kernel's relative L2 error by head, against float32, for the sampled queries."""
    q, k, v, bias, mask = operands
    rows = sampled(call, operands, sample)
    want, heads = rows.wanted, sample.heads_of(q.shape[2])
    found: dict[str, Array] = {}
    for name, plan, _ in kernels:
        if plan is not None:
            out, _ = run(plan, q, k, v, bias, mask, call.mesh)
            found[f"error {name}"] = relative_error(out[rows.batch_row][rows.rows][:, heads], want)
    return found


class Cost(NamedTuple):
    """Seconds of a call; bytes of arguments, results and temporaries; why they are missing."""

    seconds: float = 0.0
    bytes: int = 0
    failed: str = ""


def costs_of(call: MarkedCall, kernels: Sequence[Candidate], budget: float) -> dict[str, Cost]:
    """Time the kernels of one call in turns, `budget` seconds each, on random operands."""
    plan, around = call.plan, sharding.inside_auto_axes
    mesh = call.mesh if isinstance(call.mesh, jax.sharding.Mesh) else sharding.program_mesh()
    bias = None if plan.call.bias is None else jnp.zeros(plan.call.bias, plan.call.bias_dtype)
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), plan.call.mask)

    def laid(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
        letters = {"BTNH": q, "BSKH": k, "BSKV": v}
        return tuple(sharding.constrain(x, mesh, each) for each, x in letters.items())

    with around():
        q, k, v = random_inputs(plan.call, 1)[0][:3]
        operands = *(jax.jit(laid)(q, k, v) if plan.mesh else (q, k, v)), bias, ones

    def work(name: str, plan: Plan) -> TimedFunction:
        def attend(q: Array, k: Array, v: Array, bias: Any, mask: Mask) -> Array:
            return run(plan, q, k, v, bias, mask, mesh if plan.mesh else None)[0]

        return TimedFunction(attend, lambda: [operands], around if plan.mesh else None, name)

    jobs = [work(name, plan) for name, plan, _ in kernels if plan is not None]
    timed = measure(jobs, budget)
    return {j.name: Cost(t.seconds, t.peak, t.failed) for j, t in zip(jobs, timed, strict=True)}
