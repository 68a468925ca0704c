"""Measure context parallelism: each strategy beside the same kernel on one device.

    efficiency = t(1) / (n t(n))

All devices doing the work of one at once are measured too: chips that share power or air are slower
together than one whose neighbours rest, whatever the strategy. TransformerEngine's strategies can
stand beside ours (`te_mesh.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from maxattn.attention import attention
from maxattn.config import AttentionConfig
from maxattn.errors import MaxattnError
from maxattn.target import Target
from maxattn.tools.bench import ring_on_fewer_devices
from maxattn.tools.bench.jobs import both_ways, config_of, random_inputs
from maxattn.tools.bench.measure import beside_reference
from maxattn.tools.bench.report import as_kernels
from maxattn.tools.bench.row import FORWARD, BenchJob, BenchRow
from maxattn.tools.bench.te_mesh import TE_STRATEGIES, spread, te_jobs
from maxattn.tools.model_shapes import Shape

STRATEGIES = ("ring", "ulysses", "all_gather")
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
    profiled: bool = False,
    ring_on: int = 0,
) -> list[BenchRow]:
    """Measure an attention, forward and forward with backward, on one device and on a mesh.

    Args:
        shape: from `maxattn.tools.model_shapes`.
        mesh: sizes of the axes data, context and tensor.
        strategies: of context parallelism.
        kernel: that runs on every device, on one and on many.
        peers: TransformerEngine's ring and all-gather too.
        budget: seconds for one measurement, about.
        options: of XLA's compiler.
        profiled: print the device time by kernel of each.
        ring_on: how many devices run a ring over a mesh of more (`ring_on_fewer_devices.py`); 0
            for a mesh that is there.

    Raises:
        InputError: for a ring that cannot run on fewer devices.
    """
    devices = prod(mesh.values())
    if ring_on:
        ring_on_fewer_devices.check(shape, devices)
    whole = random_inputs(shape, Target.here())[:1]
    jobs = _on_one(shape, kernel, whole) + _on_each(shape, kernel, ring_on or devices, whole)
    if ring_on:
        jobs += ring_on_fewer_devices.ring_jobs(shape, kernel, devices, ring_on, whole[0])
    else:
        jobs += _on_mesh(shape, mesh, strategies, kernel, peers, whole)
    rows, ran = beside_reference(jobs, shape, whole[0], budget, options=options, profiled=profiled)
    if profiled:
        print("\n\n".join(as_kernels(job.row, timed) for job, timed in ran))
    return [_compared(row, rows[:4], devices) for row in rows]


def _forward(
    shape: Shape, config: AttentionConfig, mesh: Mesh | None, q: Array, k: Array, v: Array
) -> Array:
    return attention(q, k, v, shape.mask, config=config, mesh=mesh, role=shape.role)


def _on_one(shape: Shape, kernel: str, whole: Any) -> list[BenchJob]:
    """Return the whole attention on one device."""
    attend = partial(_forward, shape, config_of(kernel), None)
    return both_ways(shape, f"{kernel}, 1 device", attend, whole)


def _on_each(shape: Shape, kernel: str, devices: int, whole: Any) -> list[BenchJob]:
    """Return the work of one device on each of them at once."""
    config = config_of(kernel, f"{AXES['data']}={devices}")
    mesh = config.make_mesh(jax.devices()[:devices])
    copies = [tuple(jax.numpy.concatenate([x] * devices) for x in each) for each in whole]
    inputs = spread(copies, mesh, PartitionSpec("data"))
    attend = partial(_forward, shape, config, mesh)
    return both_ways(shape, f"{kernel}, each of {devices}", attend, inputs)


def _on_mesh(
    shape: Shape,
    mesh: Mapping[str, int],
    strategies: Sequence[str],
    kernel: str,
    peers: bool,
    whole: Any,
) -> list[BenchJob]:
    """Return the whole attention on the mesh: by each strategy, and by TransformerEngine's."""
    ours = [_of_strategy(shape, name, kernel, mesh, whole) for name in strategies]
    theirs = [te_jobs(shape, name, mesh, whole) for name in TE_STRATEGIES if peers]
    return [job for jobs in (*ours, *theirs) for job in jobs]


def _of_strategy(
    shape: Shape, strategy: str, kernel: str, sizes: Mapping[str, int], whole: Any
) -> list[BenchJob]:
    words = [f"{AXES[axis]}={size}" for axis, size in ({"data": 1} | dict(sizes)).items()]
    who = f"{strategy} over {sizes.get('context', 1)}"
    try:
        config = config_of(kernel, f"context_parallel={strategy}", *words)
        mesh = config.make_mesh(jax.devices()[: prod(sizes.values())])
        inputs = spread(whole, mesh, PartitionSpec("data", "context", "tensor"))
        return both_ways(shape, who, partial(_forward, shape, config, mesh), inputs)
    # jax raises ValueError for a length that does not divide over the devices.
    except (MaxattnError, ValueError) as refused:
        return [
            BenchJob(BenchRow(shape.name, who, FORWARD, note=str(refused).splitlines()[0]), shape)
        ]


def _compared(row: BenchRow, ones: list[BenchRow], devices: int) -> BenchRow:
    one = next((r for r in ones if r.what == row.what and r.ms), None)
    if one is None or row in ones or not row.ms:
        return row
    return replace(row, efficiency=one.ms / (devices * row.ms), tflops=row.tflops / devices)
