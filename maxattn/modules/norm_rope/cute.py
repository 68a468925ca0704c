"""Norm and rotary embedding in one pass over memory: CuTe kernels, launched through fa4-jax's
cutejax.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.kernels.fa4.cute_packages import import_cute
from maxattn.modules.norm_rope.cute_launch import CuteLaunch
from maxattn.modules.norm_rope.cute_threads import CuteThreads
from maxattn.modules.norm_rope.row import NormRopeRow
from maxattn.target import Target

Vectors = dict[str, Array]
Tables = tuple[Array, ...]


def forward(
    of: NormRopeRow, x: Float[Array, "M N H"], vectors: Vectors, tables: Tables, keep: bool = False
) -> tuple[Float[Array, "M N H"], Float[Array, " M"] | None]:
    """Run the forward kernel; arguments and results are those of `triton.forward`."""
    kept = keep and of.norm == "across"
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    results += [jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)] if kept else []
    launch = _launch("Forward", launch_of(of, 1, x, vectors), tuple(vectors))
    rows, fixed, table, numbers = _specs()
    y, *r = import_module("cutejax").call(
        run_forward,
        results,
        launch,
        x,
        tuple(vectors.values()),
        tables,
        in_specs=[rows, *[fixed] * len(vectors), *[table] * len(tables)],
        out_specs=[rows, numbers][: len(results)],
        name="norm_rotary",
        vmap_method="sequential",
    )
    return y, (r[0] if r else None)


def backward(
    of: NormRopeRow,
    dy: Float[Array, "M N H"],
    x: Float[Array, "M N H"],
    r: Float[Array, " M"] | None,
    vectors: Vectors,
    tables: Tables,
) -> tuple[Float[Array, "M N H"], dict[str, Float[Array, "N H"]]]:
    """Run the backward kernel; arguments and results are those of `triton.backward`."""
    launch = launch_of(of, 2, x, vectors)
    blocks = min(launch.blocks, len(x))
    total = jax.ShapeDtypeStruct((blocks, of.heads, of.head_dim), jnp.float32)
    rows, fixed, table, numbers = _specs()
    kept = [] if r is None else [r]
    dx, *sums = import_module("cutejax").call(
        run_backward,
        [jax.ShapeDtypeStruct(x.shape, x.dtype), *[total] * len(vectors)],
        _launch("Backward", launch, tuple(vectors)),
        (dy, x),
        kept,
        tuple(vectors.values()),
        tables,
        in_specs=[rows, rows, *[numbers] * len(kept), *[fixed] * len(vectors)]
        + [table] * len(tables),
        out_specs=[rows] * (1 + len(vectors)),
        name="norm_rotary_backward",
        vmap_method="sequential",
    )
    return dx, {name: each.sum(0) for name, each in zip(vectors, sums, strict=True)}


def run_forward(stream: Any, launch: Any, x: Any, vectors: Any, tables: Any, *results: Any) -> None:
    """Launch a forward while it is compiled; `results` are y and, where it is kept, r."""
    y, *r = results
    launch(x, vectors, tables, y, r, stream)


def run_backward(
    stream: Any, launch: Any, rows: Any, kept: Any, vectors: Any, tables: Any, dx: Any, *sums: Any
) -> None:
    """Launch a backward while it is compiled; `rows` are dy and x."""
    launch(rows, kept, vectors, tables, dx, sums, stream)


def launch_of(of: NormRopeRow, arrays: int, x: Array, vectors: Vectors) -> CuteLaunch:
    """Return how rows are shared; `arrays` of them are read."""
    held = sum(of.heads * of.head_dim * v.dtype.itemsize for v in vectors.values())
    gpu = Target.here().device
    sms, shared = gpu.sms, gpu.family.shared_memory
    return CuteLaunch(CuteThreads.of(of), arrays, x.dtype.itemsize, held, sms, shared)


@lru_cache(maxsize=256)
def _launch(name: str, launch: CuteLaunch, vectors: tuple[str, ...]) -> Any:
    import_cute()
    kernels = import_module("maxattn.modules.norm_rope.cute_kernels")
    return getattr(kernels, name)(launch, vectors)


def _specs() -> tuple[Any, Any, Any, Any]:
    """Say what of rows, vectors, tables and numbers is fixed when a kernel is compiled.

    XLA hands over slices where they lie: 16 bytes are what the widest load asks of an address.
    """
    import_cute()
    spec = import_module("cutejax").ArraySpec
    rows, fixed = (
        spec(static_dims=(1, 2), assumed_align=16),
        spec(static_dims=True, assumed_align=16),
    )
    return rows, fixed, spec(static_dims=(1,), assumed_align=16), spec(assumed_align=4)
