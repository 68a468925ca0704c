"""Measure kernels, and other libraries called bare, on one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.attention import attention
from maxattn.config import AttentionConfig
from maxattn.decide import refusal
from maxattn.errors import InputError, did_you_mean
from maxattn.kernels import KERNELS, DotProduct
from maxattn.kernels.base import Inputs, Rows
from maxattn.masks import Dense
from maxattn.target import Target
from maxattn.tools.bench.peers import PEERS
from maxattn.tools.bench.timing import Timed, Work, measure
from maxattn.tools.model_shapes import Shape
from maxattn.tools.random_inputs import normal

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
WORK = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}  # in units of 4 B N T S H operations
CHECKED_QUERIES = 256


@dataclass(frozen=True)
class Row:
    """Hold one measurement.

    Args:
        shape, who, what: name of the shape, the kernel or library, and "forward", "backward" or
            "forward+backward".
        ms: device time of one call; 0 where it failed.
        tflops: useful operations, of allowed pairs alone, in TFLOP/s.
        peak: bytes of arguments, results and temporaries, as the compiler reports them.
        error: largest difference from float32 of some outputs, relative to their largest entry.
        note: why there is no time.
        efficiency: of several devices: the time of one, over that of n times n.
        bound: of a module: what its time is compared with, in ms.
    """

    shape: str
    who: str
    what: str
    ms: float = 0.0
    tflops: float = 0.0
    peak: int = 0
    error: float | None = None
    note: str = ""
    efficiency: float | None = None
    bound: float | None = None


def bench(
    shape: Shape,
    kernels: Sequence[str] = (),
    peers: bool = False,
    target: Target | None = None,
    budget: float = 0.5,
) -> list[Row]:
    """Measure kernels of this library through their own forward and backward, and `auto` through
    `attention`.

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
    jobs = _jobs(shape, tuple(kernels), peers, target, inputs)
    return beside_reference(jobs, shape, inputs[0], budget)[0]


def beside_reference(
    jobs: list[Job], shape: Shape, inputs: tuple[Array, ...], budget: float, **settings: Any
) -> tuple[list[Row], list[tuple[Job, Timed]]]:
    """Measure jobs, and dense attention of the first queries, which their results are compared
    with.

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
    reference = Work(
        reference_of(shape), lambda: [tuple(x[:1] for x in inputs[:3])], name="reference in float32"
    )
    wanted, *times = measure([reference, *(job.work for job in ran)], budget, **settings)
    following = iter(times)
    rows = [job.row if job.row.note else row_of(job, next(following), wanted) for job in jobs]
    return rows, list(zip(ran, times, strict=True))


@dataclass(frozen=True)
class Job:
    """Hold one function to measure, and the row it fills; a note in it says that there is nothing
    to measure.
    """

    row: Row
    shape: Shape
    f: Callable[..., Any] = print
    make: Callable[[], list[tuple[Any, ...]]] = list
    around: Callable[[], AbstractContextManager[Any]] | None = None
    count: bool = True  # whether its operations are those of an attention
    judged: bool = True  # whether its result is one

    @property
    def work(self) -> Work:
        """What is measured."""
        return Work(self.f, self.make, self.around, f"{self.row.who}, {self.row.what}")


def _jobs(
    shape: Shape,
    kernels: tuple[str, ...],
    peers: bool,
    target: Target,
    inputs: list[tuple[Array, ...]],
) -> list[Job]:
    jobs = []
    for name in kernels or (*KERNELS, "auto"):
        if name == "auto":
            jobs += both_ways(shape, "auto", _auto(shape), inputs)
            continue
        reason = refusal(name, shape.call(), target)
        if reason is None and (kernels or not too_large(name, shape)):
            jobs += _of_kernel(name, shape, target, inputs)
        elif reason is not None and kernels:
            jobs.append(Job(Row(shape.name, name, FORWARD, note=reason.rule), shape))
    if peers and shape.mask.is_full:
        for name, make in PEERS.items():
            try:
                jobs += both_ways(shape, f"bare {name}", make(), inputs)
            except ImportError as missing:
                jobs.append(Job(Row(shape.name, f"bare {name}", FORWARD, note=str(missing)), shape))
    return jobs


def check_kernels(names: Sequence[str]) -> None:
    """Refuse names of no kernel.

    Raises:
        InputError: naming those that there are.
    """
    known = (*KERNELS, "auto")
    for name in names:
        if name not in known:
            remedy = did_you_mean(name, known) or "write one of them"
            raise InputError("kernel", name, f"the kernels are {', '.join(known)}", remedy)


def config_of(kernel: str, *overrides: str) -> AttentionConfig:
    """Return the config that asks for a kernel of `KERNELS`, or for auto."""
    if kernel == "memory_efficient":
        return AttentionConfig.from_overrides(
            ["attention=dot_product", "use_memory_efficient_attention=true", *overrides]
        )
    return AttentionConfig.from_overrides([f"attention={kernel}", *overrides])


# ---- what is measured ----------------------------------------------------------------------------


def _of_kernel(
    name: str, shape: Shape, target: Target, inputs: list[tuple[Array, ...]]
) -> list[Job]:
    """Return a kernel's forward, and its backward from a given output and LSE."""
    kernel = KERNELS[name].build(shape.call(), AttentionConfig(), target)
    mask = shape.mask.bind(shape.q_len, shape.kv_len, shape.batch, shape.heads)
    if name == "dot_product" and scores_bytes(shape) > 4e8:
        inputs = inputs[
            :1
        ]  # long enough alone, and scores of several calls would be in memory together

    def forward(q: Array, k: Array, v: Array, dout: Array) -> Any:
        return tuple(kernel.forward(Inputs(q, k, v, mask=mask)))

    def backward(q: Array, k: Array, v: Array, dout: Array, out: Array, lse: Array) -> Any:
        rows = Rows(out, lse, dout, jnp.zeros_like(lse))
        dq, dk, dv, _ = kernel.backward(Inputs(q, k, v, mask=mask), rows)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)

    def given() -> list[tuple[Array, ...]]:
        first = jax.jit(forward)
        return [(*each, *first(*each)) for each in inputs]

    row = Row(shape.name, name, FORWARD)
    return [
        Job(row, shape, forward, lambda: inputs),
        Job(replace(row, what=BACKWARD), shape, backward, given),
    ]


def both_ways(
    shape: Shape, who: str, f: Callable[..., Any], inputs: list[tuple[Array, ...]]
) -> list[Job]:
    """Return a function's forward, and forward and backward together."""
    row = Row(shape.name, who, FORWARD)
    forward = Job(row, shape, f, lambda: [each[:3] for each in inputs])
    return [forward, Job(replace(row, what=BOTH), shape, with_gradient(f), lambda: inputs)]


def _auto(shape: Shape) -> Callable[..., Any]:
    return lambda q, k, v: attention(q, k, v, shape.mask, role=shape.role)


def with_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    def both(q: Array, k: Array, v: Array, dout: Array) -> Any:
        out, gradients = jax.vjp(f, q, k, v)
        return out, gradients(dout)

    return both


def random_inputs(shape: Shape, target: Target) -> list[tuple[Array, ...]]:
    """Make random (q, k, v, dout): several of small shapes, so that calls in one program differ."""
    b, t, s, n, h = shape.batch, shape.q_len, shape.kv_len, shape.heads, shape.head_dim
    size = b * t * n * h
    sets = 1 if size > 2e8 or target.platform == "cpu" else 2 if size > 6e7 else 8
    keys = jax.random.split(jax.random.key(0), (sets, 4))
    sizes = (
        (b, t, n, h),
        (b, s, shape.kv_heads or n, h),
        (b, s, shape.kv_heads or n, h),
        (b, t, n, h),
    )
    make = jax.jit(partial(normal, dtype=shape.dtype), static_argnums=1)
    return [tuple(make(key, dims) for key, dims in zip(row, sizes, strict=True)) for row in keys]


def too_large(name: str, shape: Shape) -> bool:
    """Leave out what nobody would run: dense scores of more than 30 GB, plain JAX for more than 2
    TFLOP.
    """
    dense, tiled = name == "dot_product", name == "memory_efficient"
    return (dense and scores_bytes(shape) > 3e10) or (tiled and operations(shape) > 2e12)


def scores_bytes(shape: Shape) -> float:
    """Return the bytes of all scores in float32."""
    return 4.0 * shape.batch * shape.heads * shape.q_len * shape.kv_len


# ---- what is said of it --------------------------------------------------------------------------


def row_of(job: Job, timed: Timed, wanted: Timed | None) -> Row:
    """Fill a row with what was measured; the error is of a forward, against what is wanted."""
    if not timed.seconds:
        return replace(job.row, note=timed.failed)
    if not job.count:
        return replace(job.row, ms=1e3 * timed.seconds, peak=timed.peak)
    rate = operations(job.shape) * WORK[job.row.what] / timed.seconds / 1e12
    row = replace(job.row, ms=1e3 * timed.seconds, tflops=rate, peak=timed.peak)
    if job.row.what != FORWARD or not job.judged or wanted is None or wanted.first is None:
        return row
    out = timed.first[0] if isinstance(timed.first, tuple) else timed.first
    got = out[:1, : wanted.first.shape[1]].astype(jnp.float32)
    return replace(
        row, error=float(jnp.abs(got - wanted.first).max() / jnp.abs(wanted.first).max())
    )


def operations(shape: Shape) -> float:
    pairs = shape.mask.bind(shape.q_len, shape.kv_len).allowed_pairs(shape.q_len, shape.kv_len)
    return 4.0 * shape.batch * shape.heads * shape.head_dim * pairs


def reference_of(shape: Shape) -> Callable[..., Any]:
    """Return dense attention in float32 of the first queries of one batch row."""
    few = min(CHECKED_QUERIES, shape.q_len)
    allowed = shape.mask.bind(shape.q_len, shape.kv_len).allowed(
        np.arange(few), np.arange(shape.kv_len)
    )
    mask = Dense(np.asarray(allowed)).bind(few, shape.kv_len)
    dense = DotProduct(shape.call().scale)

    def reference(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.astype(jnp.float32) for x in (q[:, :few], k, v))
        return dense.forward(Inputs(q, k, v, mask=mask)).out

    return reference
