"""Measure context parallelism: each strategy on n devices, and the kernel alone on one device.

    efficiency = t(1) / (n t(n))

The one-device call is also timed on all devices at once: chips that share power or air are slower
together than one chip whose neighbours idle, whatever the strategy. With `peers`,
TransformerEngine's strategies are measured too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from maxattn._attention import attention
from maxattn.config import AttentionConfig
from maxattn.errors import MaxattnError
from maxattn.jax_private.mesh import auto_mesh
from maxattn.target import Target
from maxattn.tools.bench.kernels import beside_reference, both_ways, config_of, inputs_of
from maxattn.tools.bench.peers import te_attention
from maxattn.tools.bench.row import BenchJob, BenchRow, refused_job
from maxattn.tools.model_shapes import Shape

STRATEGIES = ("ring", "ulysses", "all_gather")
TE_STRATEGIES = {"TransformerEngine ring": "RING", "TransformerEngine all-gather": "ALL_GATHER"}
AXES = {
    "data": "ici_data_parallelism",
    "context": "ici_context_parallelism",
    "tensor": "ici_tensor_parallelism",
}


def bench_mesh(
    shape: Shape,
    mesh: Mapping[str, int],
    strategies: Sequence[str] = STRATEGIES,
    kernel: str = "auto",
    peers: bool = False,
    budget: float = 0.5,
    options: Mapping[str, Any] | None = None,
) -> list[BenchRow]:
    """Measure attention on one device and on a mesh; `peers` adds TransformerEngine's two."""
    devices = prod(mesh.values())
    whole = inputs_of(shape, Target.here())[:1]
    alone = partial(_forward, shape, config_of(kernel), None)
    jobs = both_ways(shape, f"{kernel}, 1 device", alone, whole)
    jobs += _on_each(shape, kernel, devices, whole)
    for name in strategies:
        jobs += _of_strategy(shape, name, kernel, mesh, whole)
    for name in TE_STRATEGIES if peers else ():
        jobs += _of_te(shape, name, mesh, whole)
    rows = beside_reference(jobs, shape, whole[0], budget, options)
    return [_compared(row, rows[:4], devices) for row in rows]


def _forward(
    shape: Shape, config: AttentionConfig, mesh: Mesh | None, q: Array, k: Array, v: Array
) -> Array:
    return attention(q, k, v, shape.mask, config=config, mesh=mesh, role=shape.role)


def _on_each(shape: Shape, kernel: str, devices: int, whole: Any) -> list[BenchJob]:
    config = config_of(kernel, f"{AXES['data']}={devices}")
    mesh = config.make_mesh(jax.devices()[:devices])
    copies = [tuple(jax.numpy.concatenate([x] * devices) for x in each) for each in whole]
    inputs = _spread(copies, mesh, PartitionSpec("data"))
    attend = partial(_forward, shape, config, mesh)
    return both_ways(shape, f"{kernel}, each of {devices}", attend, inputs)


def _of_strategy(
    shape: Shape, strategy: str, kernel: str, sizes: Mapping[str, int], whole: Any
) -> list[BenchJob]:
    words = [f"{AXES[axis]}={size}" for axis, size in ({"data": 1} | dict(sizes)).items()]
    who = f"{strategy} over {sizes.get('context', 1)}"
    try:
        config = config_of(kernel, f"context_parallel={strategy}", *words)
        mesh = config.make_mesh(jax.devices()[: prod(sizes.values())])
        inputs = _spread(whole, mesh, PartitionSpec("data", "context", "tensor"))
        return both_ways(shape, who, partial(_forward, shape, config, mesh), inputs)
    # jax raises ValueError for a length that does not divide over the devices.
    except (MaxattnError, ValueError) as refused:
        return [refused_job(shape, who, refused)]


def _of_te(shape: Shape, name: str, sizes: Mapping[str, int], whole: Any) -> list[BenchJob]:
    try:
        te, sharding = (
            import_module(f"transformer_engine.jax.{m}") for m in ("attention", "sharding")
        )
        mesh = auto_mesh(np.asarray(jax.devices()[: sizes.get("context", 1)]), ("context",))
        inputs = _spread(whole, mesh, PartitionSpec(None, "context"))
    except (ImportError, ValueError) as failed:
        return [refused_job(shape, name, failed)]

    @contextmanager
    def around() -> Iterator[None]:
        resource = sharding.MeshResource(cp_resource="context")
        with mesh, sharding.global_shard_guard(resource):
            yield

    strategy = te.CPStrategy[TE_STRATEGIES[name]]
    attend = te_attention(te, context_parallel_strategy=strategy, context_parallel_axis="context")
    return [replace(job, around=around) for job in both_ways(shape, name, attend, inputs)]


def _spread(whole: Any, mesh: Mesh, spec: PartitionSpec) -> list[tuple[Array, ...]]:
    axes = (axis if axis in mesh.axis_names else None for axis in spec)
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return [tuple(jax.device_put(x, sharding) for x in each) for each in whole]


def _compared(row: BenchRow, ones: list[BenchRow], devices: int) -> BenchRow:
    one = next((r for r in ones if r.what == row.what and r.ms), None)
    if one is None or row in ones or not row.ms:
        return row
    return replace(row, efficiency=one.ms / (devices * row.ms), tflops=row.tflops / devices)
