"""TransformerEngine's context parallelism, to stand beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from maxattn.jax_private.mesh import auto_mesh
from maxattn.tools.bench.jobs import both_ways
from maxattn.tools.bench.peers import te_attention
from maxattn.tools.bench.row import FORWARD, BenchJob, BenchRow
from maxattn.tools.model_shapes import Shape

TE_STRATEGIES = {"TransformerEngine ring": "RING", "TransformerEngine all-gather": "ALL_GATHER"}


def te_jobs(shape: Shape, name: str, sizes: Mapping[str, int], whole: Any) -> list[BenchJob]:
    """Return one of `TE_STRATEGIES`, forward and with its gradient, or why it does not run."""
    try:
        te, sharding = (
            import_module(f"transformer_engine.jax.{m}") for m in ("attention", "sharding")
        )
        mesh = auto_mesh(np.asarray(jax.devices()[: sizes.get("context", 1)]), ("context",))
        inputs = spread(whole, mesh, PartitionSpec(None, "context"))
    except (ImportError, ValueError) as failed:
        return [
            BenchJob(BenchRow(shape.name, name, FORWARD, note=str(failed).splitlines()[0]), shape)
        ]

    @contextmanager
    def around() -> Iterator[None]:
        resource = sharding.MeshResource(cp_resource="context")
        with mesh, sharding.global_shard_guard(resource):
            yield

    strategy = te.CPStrategy[TE_STRATEGIES[name]]
    attend = te_attention(te, context_parallel_strategy=strategy, context_parallel_axis="context")
    return [replace(job, around=around) for job in both_ways(shape, name, attend, inputs)]


def spread(whole: Any, mesh: Mesh, spec: PartitionSpec) -> list[tuple[Array, ...]]:
    """Put inputs onto a mesh, along those axes of a spec that it has."""
    axes = (axis if axis in mesh.axis_names else None for axis in spec)
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return [tuple(jax.device_put(x, sharding) for x in each) for each in whole]
