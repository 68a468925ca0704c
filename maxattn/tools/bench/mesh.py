"""Measure context parallelism: each strategy on all devices beside the same kernel on one, and
TransformerEngine's.

efficiency = t(1) / (n t(n))

All devices doing the work of one at once are measured too: chips that share power or air are slower
together than one whose neighbours rest, whatever the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from maxattn.attention import attention
from maxattn.config import AttentionConfig
from maxattn.errors import MaxattnError
from maxattn.jax_private.mesh import auto_mesh
from maxattn.target import Target
from maxattn.tools.bench.measure import (
    FORWARD,
    Job,
    Row,
    beside_reference,
    both_ways,
    config_of,
    random_inputs,
)
from maxattn.tools.bench.played import check, of_played
from maxattn.tools.bench.report import as_kernels
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
    profiled: bool = False,
    played_by: int = 0,
) -> list[Row]:
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
        played_by: devices that play a ring over a mesh of more: `played.py`; 0 for a mesh that is
            there.

    Raises:
        InputError: for what cannot be played.
    """
    devices = prod(mesh.values())
    if played_by:
        check(shape, devices)
    whole = random_inputs(shape, Target.here())[:1]
    jobs = both_ways(
        shape, f"{kernel}, 1 device", partial(_attend, shape, config_of(kernel), None), whole
    )
    jobs += _of_each(shape, kernel, played_by or devices, whole)
    if played_by:
        jobs += of_played(shape, kernel, devices, played_by, whole[0])
    else:
        jobs += [
            job
            for strategy in strategies
            for job in _of_strategy(shape, strategy, kernel, mesh, whole)
        ]
        jobs += [job for name in TE_STRATEGIES if peers for job in _of_te(shape, name, mesh, whole)]
    rows, ran = beside_reference(jobs, shape, whole[0], budget, options=options, profiled=profiled)
    if profiled:
        print("\n\n".join(as_kernels(job.row, timed) for job, timed in ran))
    return [_compared(row, rows[:4], devices) for row in rows]


def _attend(
    shape: Shape, config: AttentionConfig, mesh: Mesh | None, q: Array, k: Array, v: Array
) -> Array:
    return attention(q, k, v, shape.mask, config=config, mesh=mesh, role=shape.role)


def _of_each(shape: Shape, kernel: str, devices: int, whole: Any) -> list[Job]:
    """Return the work of one device on each of them at once."""
    config = config_of(kernel, f"{AXES['data']}={devices}")
    made = config.make_mesh(jax.devices()[:devices])
    copies = [tuple(jax.numpy.concatenate([x] * devices) for x in each) for each in whole]
    each = partial(_attend, shape, config, made)
    return both_ways(
        shape, f"{kernel}, each of {devices}", each, _spread(copies, made, PartitionSpec("data"))
    )


def _of_strategy(
    shape: Shape, strategy: str, kernel: str, mesh: Mapping[str, int], whole: Any
) -> list[Job]:
    sizes = [f"{AXES[axis]}={size}" for axis, size in ({"data": 1} | dict(mesh)).items()]
    who = f"{strategy} over {mesh.get('context', 1)}"
    try:
        config = config_of(kernel, f"context_parallel={strategy}", *sizes)
        made = config.make_mesh(jax.devices()[: prod(mesh.values())])
        spread = _spread(whole, made, PartitionSpec("data", "context", "tensor"))
        return both_ways(shape, who, partial(_attend, shape, config, made), spread)
    except (
        MaxattnError,
        ValueError,
    ) as refused:  # jax lays no length over devices that does not divide
        return [Job(Row(shape.name, who, FORWARD, note=str(refused).splitlines()[0]), shape)]


def _spread(whole: Any, mesh: Mesh, spec: PartitionSpec) -> list[tuple[Array, ...]]:
    place = NamedSharding(
        mesh, PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in spec))
    )
    return [tuple(jax.device_put(x, place) for x in each) for each in whole]


# ---- TransformerEngine ---------------------------------------------------------------------------


def _of_te(shape: Shape, name: str, mesh: Mapping[str, int], whole: Any) -> list[Job]:
    try:
        te, sharding = (
            import_module(f"transformer_engine.jax.{module}")
            for module in ("attention", "sharding")
        )
        made = auto_mesh(np.asarray(jax.devices()[: mesh.get("context", 1)]), ("context",))
        spread = _spread(whole, made, PartitionSpec(None, "context"))
    except (ImportError, ValueError) as failed:
        return [Job(Row(shape.name, name, FORWARD, note=str(failed).splitlines()[0]), shape)]

    def around() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(made)
        stack.enter_context(
            sharding.global_shard_guard(sharding.MeshResource(cp_resource="context"))
        )
        return stack

    f = _te_attention(te, TE_STRATEGIES[name])
    return [replace(job, around=around) for job in both_ways(shape, name, f, spread)]


def _te_attention(te: Any, strategy: str) -> Callable[..., Array]:
    def attend(q: Array, k: Array, v: Array) -> Array:
        lengths = tuple(jax.numpy.full(x.shape[0], x.shape[1], jax.numpy.int32) for x in (q, k))
        return te.fused_attn(
            (q, k, v),
            None,
            te.SequenceDescriptor.from_seqlens(lengths),
            None,
            te.AttnBiasType.NO_BIAS,
            te.AttnMaskType.NO_MASK,
            te.QKVLayout.BSHD_BSHD_BSHD,
            te.AttnSoftmaxType.VANILLA_SOFTMAX,
            q.shape[3] ** -0.5,
            0.0,
            True,
            context_parallel_strategy=te.CPStrategy[strategy],
            context_parallel_axis="context",
        )

    return attend


# ---- what is said of it --------------------------------------------------------------------------


def _compared(row: Row, ones: list[Row], devices: int) -> Row:
    one = next((r for r in ones if r.what == row.what and r.ms), None)
    if one is None or row in ones or not row.ms:
        return row
    return replace(row, efficiency=one.ms / (devices * row.ms), tflops=row.tflops / devices)
