"""Measure kernels, and other libraries called bare, on one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.attention import attention
from maxattn.kernels import KERNELS, DotProduct, refusal
from maxattn.kernels.base import Inputs
from maxattn.masks import Dense
from maxattn.target import Target
from maxattn.tools.bench.jobs import both_ways, check_kernels, of_kernel, random_inputs, too_large
from maxattn.tools.bench.peers import PEERS
from maxattn.tools.bench.row import FORWARD, BenchJob, BenchRow, row_of
from maxattn.tools.bench.timing import Timed, TimedFunction, measure
from maxattn.tools.model_shapes import Shape

CHECKED_QUERIES = 256


def bench(
    shape: Shape,
    kernels: Sequence[str] = (),
    peers: bool = False,
    target: Target | None = None,
    budget: float = 0.5,
) -> list[BenchRow]:
    """Measure kernels through their own forward and backward, and `auto` through `attention`.

    Args:
        shape: from `maxattn.tools.model_shapes`.
        kernels: names, and "auto"; default every kernel that can run here, and auto.
        peers: other libraries too, called as their own documentation says; full masks alone.
        target: default this machine.
        budget: seconds for one measurement, about.

    Raises:
        InputError: a kernel has no such name.
    """
    check_kernels(kernels)
    target = target or Target.here()
    inputs = random_inputs(shape, target)
    names, named = kernels or (*KERNELS, "auto"), bool(kernels)
    jobs = [job for n in names for job in _of_name(n, shape, target, inputs, named)]
    if peers and shape.mask.is_full:
        jobs += [job for name in PEERS for job in _of_peer(name, shape, inputs)]
    return beside_reference(jobs, shape, inputs[0], budget)[0]


def beside_reference(
    jobs: list[BenchJob], shape: Shape, inputs: tuple[Array, ...], budget: float, **settings: Any
) -> tuple[list[BenchRow], list[tuple[BenchJob, Timed]]]:
    """Measure jobs, and dense attention of the first queries to compare their results with.

    Args:
        jobs: of a shape.
        shape: that.
        inputs: one (q, k, v, ...) of it.
        budget: seconds for one measurement, about.
        settings: for `measure`.

    Returns:
        A row for every job, and the time of each that ran.
    """
    ran = [job for job in jobs if not job.row.note]
    first = [tuple(x[:1] for x in inputs[:3])]
    reference = TimedFunction(reference_of(shape), lambda: first, name="reference in float32")
    wanted, *times = measure([reference, *(job.work for job in ran)], budget, **settings)
    following = iter(times)
    rows = [job.row if job.row.note else row_of(job, next(following), wanted) for job in jobs]
    return rows, list(zip(ran, times, strict=True))


def _of_name(
    name: str, shape: Shape, target: Target, inputs: list[tuple[Array, ...]], named: bool
) -> Iterator[BenchJob]:
    """Yield what is measured of a kernel; one that the user named says why it cannot run."""
    if name == "auto":
        yield from both_ways(shape, name, _auto(shape), inputs)
        return
    reason = refusal(name, shape.call(), target)
    if reason is None and (named or not too_large(name, shape)):
        yield from of_kernel(name, shape, target, inputs)
    elif reason is not None and named:
        yield BenchJob(BenchRow(shape.name, name, FORWARD, note=reason.rule), shape)


def _of_peer(name: str, shape: Shape, inputs: list[tuple[Array, ...]]) -> list[BenchJob]:
    try:
        return both_ways(shape, f"bare {name}", PEERS[name](), inputs)
    except ImportError as missing:
        return [BenchJob(BenchRow(shape.name, f"bare {name}", FORWARD, note=str(missing)), shape)]


def _auto(shape: Shape) -> Callable[..., Any]:
    return lambda q, k, v: attention(q, k, v, shape.mask, role=shape.role)


def reference_of(shape: Shape) -> Callable[..., Any]:
    """Return dense attention in float32 of the first queries of one batch row."""
    few = min(CHECKED_QUERIES, shape.q_len)
    bound = shape.mask.bind(shape.q_len, shape.kv_len)
    allowed = bound.allowed(np.arange(few), np.arange(shape.kv_len))
    mask = Dense(np.asarray(allowed)).bind(few, shape.kv_len)
    dense = DotProduct(shape.call().scale)

    def reference(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.astype(jnp.float32) for x in (q[:, :few], k, v))
        return dense.forward(Inputs(q, k, v, mask=mask)).out

    return reference
