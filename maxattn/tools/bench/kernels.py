"""Measure the kernels, and other libraries' attention, on one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn._attention import attention
from maxattn.config import AttentionConfig
from maxattn.errors import InputError, did_you_mean
from maxattn.kernels import KERNELS, build, refusal, scores_of
from maxattn.kernels.base import Inputs
from maxattn.kernels.dot_product import DotProduct
from maxattn.masks import Dense
from maxattn.measuring.passes import backward, forward, random_inputs, with_gradient
from maxattn.measuring.timing import TimedFunction, measure
from maxattn.target import Target
from maxattn.tools.bench.peers import PEERS
from maxattn.tools.bench.row import (
    BACKWARD,
    BOTH,
    FORWARD,
    BenchJob,
    BenchRow,
    refused_job,
    row_of,
)
from maxattn.tools.model_shapes import Shape

CHECKED_QUERIES = 256
MANY_SCORES = 1e8  # query-key pairs from which one dot_product is long enough to measure alone
TOO_MANY_SCORES = 7.5e9  # query-key pairs beyond which no user runs dot_product
TOO_MUCH_WORK = 2e12  # FLOPs beyond which no user runs plain JAX


def bench(
    shape: Shape,
    kernels: Sequence[str] = (),
    peers: bool = False,
    target: Target | None = None,
    budget: float = 0.5,
) -> list[BenchRow]:
    """Measure kernels, by default all and `auto`, about `budget` seconds each; `peers` too."""
    check_kernels(kernels)
    target = target or Target.here()
    inputs = inputs_of(shape, target)
    names, named = kernels or (*KERNELS, "auto"), bool(kernels)
    jobs = [job for n in names for job in _of_name(n, shape, target, inputs, named)]
    if peers and shape.mask.is_full:
        jobs += [job for name in PEERS for job in _of_peer(name, shape, inputs)]
    return beside_reference(jobs, shape, inputs[0], budget)


def check_kernels(names: Sequence[str]) -> None:
    """Refuse names that no kernel has."""
    known = (*KERNELS, "auto")
    for name in names:
        if name not in known:
            remedy = did_you_mean(name, known) or "write one of these names"
            raise InputError("kernel", name, f"it must be one of {', '.join(known)}", remedy)


def beside_reference(
    jobs: list[BenchJob],
    shape: Shape,
    inputs: tuple[Array, ...],
    budget: float,
    options: Mapping[str, Any] | None = None,
) -> list[BenchRow]:
    """Measure a shape's jobs; compare results with dense attention of the first queries."""
    first = [tuple(x[:1] for x in inputs[:3])]
    reference = TimedFunction(
        _reference(shape), lambda: first, name="reference in float32", keeps_result=True
    )
    ran = [job for job in jobs if not job.row.note]
    wanted, *times = measure([reference, *(job.work for job in ran)], budget, options)
    following = iter(times)
    return [job.row if job.row.note else row_of(job, next(following), wanted) for job in jobs]


def _reference(shape: Shape) -> Callable[..., Any]:
    """Return dense float32 attention of the first queries of one batch row."""
    few = min(CHECKED_QUERIES, shape.q_len)
    bound = shape.mask.bind(shape.q_len, shape.kv_len)
    allowed = bound.allowed(np.arange(few), np.arange(shape.kv_len))
    mask = Dense(np.asarray(allowed)).bind(few, shape.kv_len)
    dense = DotProduct(shape.call().scale)

    def reference(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.astype(jnp.float32) for x in (q[:, :few], k, v))
        return dense.forward(Inputs(q, k, v, mask=mask)).out

    return reference


# ---- what is measured ----------------------------------------------------------------------------


def config_of(kernel: str, *overrides: str) -> AttentionConfig:
    """Return the config that names a kernel of `KERNELS`, or auto."""
    words = [f"attention={kernel}"]
    if kernel == "memory_efficient":
        words = ["attention=dot_product", "use_memory_efficient_attention=true"]
    return AttentionConfig.from_overrides([*words, *overrides])


def inputs_of(shape: Shape, target: Target) -> list[tuple[Array, ...]]:
    """Draw sets of (q, k, v, dout): several for a small shape, whose calls share a program."""
    size = shape.batch * shape.q_len * shape.heads * shape.head_dim
    count = 1 if size > 2e8 or target.platform == "cpu" else 2 if size > 6e7 else 8
    return random_inputs(shape.call(), count)


def too_large(name: str, shape: Shape) -> bool:
    """Return whether a shape has too many scores for dense attention, or FLOPs for plain JAX."""
    if name == "dot_product":
        return scores_of(shape.call()) > TOO_MANY_SCORES
    return name == "memory_efficient" and shape.operations > TOO_MUCH_WORK


def _of_name(
    name: str, shape: Shape, target: Target, inputs: list[tuple[Array, ...]], named: bool
) -> Iterator[BenchJob]:
    """Yield a kernel's jobs; if a named kernel cannot run, yield a job with the reason."""

    def auto(q: Array, k: Array, v: Array) -> Array:
        return attention(q, k, v, shape.mask, role=shape.role)

    if name == "auto":
        yield from both_ways(shape, name, auto, inputs)
        return
    reason = refusal(name, shape.call(), target)
    if reason is None and (named or not too_large(name, shape)):
        yield from _of_kernel(name, shape, target, inputs)
    elif reason is not None and named:
        yield refused_job(shape, name, reason.rule)


def _of_kernel(
    name: str, shape: Shape, target: Target, inputs: list[tuple[Array, ...]]
) -> list[BenchJob]:
    """Return jobs for a kernel's forward, and for its backward from a given output and LSE."""
    kernel = build(name, shape.call(), AttentionConfig(), target)
    mask = shape.mask.bind(shape.q_len, shape.kv_len, shape.batch, shape.heads)
    if name == "dot_product" and scores_of(shape.call()) > MANY_SCORES:
        inputs = inputs[:1]  # otherwise scores of several calls would be in memory together

    def ahead(*arrays: Array) -> Any:
        return forward(kernel, *arrays, mask)

    def back(*arrays: Array) -> Any:
        return backward(kernel, *arrays[:4], mask, *arrays[4:])

    def with_outputs() -> list[tuple[Array, ...]]:
        first = jax.jit(ahead)
        return [(*each, *first(*each)) for each in inputs]

    row = BenchRow(shape.name, name, FORWARD)
    job = BenchJob(row, shape, ahead, lambda: inputs)
    return [job, BenchJob(replace(row, what=BACKWARD), shape, back, with_outputs)]


def _of_peer(name: str, shape: Shape, inputs: list[tuple[Array, ...]]) -> list[BenchJob]:
    try:
        return both_ways(shape, f"bare {name}", PEERS[name](), inputs)
    except ImportError as missing:
        return [refused_job(shape, f"bare {name}", missing)]


def both_ways(
    shape: Shape, who: str, f: Callable[..., Any], inputs: list[tuple[Array, ...]]
) -> list[BenchJob]:
    """Return jobs for a function's forward, and for forward and backward together."""
    row = BenchRow(shape.name, who, FORWARD)
    forward = BenchJob(row, shape, f, lambda: [each[:3] for each in inputs])
    return [forward, BenchJob(replace(row, what=BOTH), shape, with_gradient(f), lambda: inputs)]
