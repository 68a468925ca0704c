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


def forward_into(
    of: NormRopeRow,
    x: Float[Array, "B T N H"],
    vectors: Vectors,
    tables: Tables,
    first: int,
    into: Float[Array, "B L N H"] | jax.ShapeDtypeStruct,
) -> Float[Array, "B L N H"]:
    """Run the forward kernel, and store its rows in a longer sequence.

    Args:
        of, vectors, tables: as for `forward`.
        x: rows, example by example.
        first: where those of an example begin in the longer sequence.
        into: the sequence, whose memory is the result's; or its shape, the rest left as it is.
    """
    rows, fixed, table, _ = _specs()
    flat, whole = x.reshape(-1, *x.shape[2:]), _spec_of_sequence()
    given = () if isinstance(into, jax.ShapeDtypeStruct) else (into,)
    leaves = 1 + len(vectors) + len(tables)
    launch = launch_of(of, 1, flat, vectors)
    return import_module("cutejax").call(
        run_into,
        jax.ShapeDtypeStruct(into.shape, into.dtype),
        _launch("Forward", launch, tuple(vectors), first),
        flat,
        tuple(vectors.values()),
        tables,
        given,
        in_specs=[rows, *[fixed] * len(vectors), *[table] * len(tables), *[whole] * len(given)],
        out_specs=whole,
        input_output_aliases={leaves: 0} if given else None,
        name="norm_rotary_into",
        vmap_method="sequential",
    )


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


def forward_pair(
    of: NormRopeRow,
    both: tuple[Float[Array, "M N H"], Float[Array, "M N H"]],
    vectors: tuple[Vectors, Vectors],
    tables: Tables,
) -> tuple[Float[Array, "M N H"], Float[Array, "M N H"]]:
    """Run the forward kernel on queries and keys of the same tokens, in one launch.

    Args:
        of, tables: as for `forward`.
        both: queries and keys.
        vectors: of each, of the same names and shapes.
    """
    launch = launch_of(of, 1, both[0], vectors[0])
    rows, fixed, table, _ = _specs()
    pairs = tuple(zip(*(each.values() for each in vectors), strict=True))
    return import_module("cutejax").call(
        run_pair,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in both],
        _launch("PairForward", launch, tuple(vectors[0])),
        both,
        pairs,
        tables,
        in_specs=[rows, rows, *[fixed] * (2 * len(pairs)), *[table] * len(tables)],
        out_specs=[rows, rows],
        name="norm_rotary_pair",
        vmap_method="sequential",
    )


def run_forward(stream: Any, launch: Any, x: Any, vectors: Any, tables: Any, *results: Any) -> None:
    """Launch a forward while it is compiled; `results` are y and, where it is kept, r."""
    y, *r = results
    launch(x, vectors, tables, y, r, stream)


def run_into(
    stream: Any, launch: Any, x: Any, vectors: Any, tables: Any, given: Any, y: Any
) -> None:
    """Launch a forward while it is compiled; `given` is y before it, in its memory."""
    launch(x, vectors, tables, y, [], stream)


def run_pair(stream: Any, launch: Any, both: Any, vectors: Any, tables: Any, *results: Any) -> None:
    """Launch a forward of queries and keys while it is compiled."""
    launch(both, vectors, tables, results, stream)


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
def _launch(name: str, launch: CuteLaunch, vectors: tuple[str, ...], *more: int) -> Any:
    import_cute()
    kernels = import_module("maxattn.modules.norm_rope.cute_kernels")
    return getattr(kernels, name)(launch, vectors, *more)


def _spec_of_sequence() -> Any:
    import_cute()
    return import_module("cutejax").ArraySpec(static_dims=(2, 3), assumed_align=16)


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
