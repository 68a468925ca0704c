"""The row kernel's calls from jax, through fa4-jax's cutejax, and where it can run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float

from maxattn.jax_private.cute import import_cute
from maxattn.jax_private.mesh import ambient_mesh, axis_names_of_type
from maxattn.jax_private.varying import checked_axes
from maxattn.kernels.flash import has_fa4
from maxattn.modules.row_kernel.work import RowLaunch
from maxattn.target import Target

Rows = Float[Array, "B T NH"]
Jobs = tuple[Array, ...]
"""One array, or those of two jobs that share a launch: queries and keys."""


def why_not(target: Target, mesh: Any) -> str:
    """Say why the kernel cannot run on an NVIDIA GPU, whatever the rows; empty where it can.

    Args:
        target: the machine.
        mesh: the caller's.
    """
    if target.version("fa4-jax") is None:
        return "fa4-jax is not installed"
    if not has_fa4(target):
        return f"fa4-jax has no kernels for {target.device_kind}"
    for package in ("fa4-jax", "nvidia-cutlass-dsl"):
        if reason := target.refuse_untested("norm and rotary embedding", package):
            return reason.rule
    ambient = ambient_mesh()
    if ambient is None:
        spread = jax.device_count() > 1
    else:
        if checked_axes(axis_names_of_type(ambient, AxisType.Manual)):
            return "the surrounding shard_map checks what varies (check_vma)"
        kinds = AxisType.Auto, AxisType.Explicit
        left = frozenset[str]().union(*(axis_names_of_type(ambient, kind) for kind in kinds))
        spread = any(ambient.shape[axis] > 1 for axis in left)
    # XLA would gather what the kernel reads.
    if mesh is None and spread:
        return "arrays may lie over several devices, and the module has no mesh="
    return ""


def forward(
    launch: RowLaunch,
    rows: tuple[Jobs, ...],
    parts: tuple[Jobs, ...],
    tables: tuple[Array, ...] = (),
    keep: bool = False,
    first: int | None = None,
    into: Array | jax.ShapeDtypeStruct | None = None,
    name: str = "norm_rotary",
) -> list[Any]:
    """Norm rows: z = x + bias, or other + gate (x + bias); y = rotate(norm(z) scale + shift).

    Args:
        launch: how rows are shared among blocks.
        rows: x, [B, T, N H] of each job; before it, what it is added to.
        parts: of the vectors, [B or 1, F or 1, R, N H], or [1, 1, 1, H] for all heads, in the order
            of `launch.work.vectors`. F is one number for all that have frames, and divides T.
        tables: cosines and sines in float32, [L, H/2], L dividing B T; or none.
        keep: whether to return 1 / root of a norm across heads, [B T].
        first: where an example's rows begin in `into`.
        into: a longer sequence, whose memory is y's; or its shape, and the rest is undefined.
        name: of the call in programs.

    Returns:
        y of each job; then what was normed, z, where x is added to something; then 1 / root.
    """
    cutejax, kernel, specs = _cute()
    x, given = rows[0], () if into is None or isinstance(into, jax.ShapeDtypeStruct) else (into,)
    results: list[tuple[Any, ...]] = [tuple(_shape(each if into is None else into) for each in x)]
    results += [results[0]] if len(rows) > 1 else []
    if keep and launch.work.norm == "across":
        b, t, _ = x[0].shape
        results += [(jax.ShapeDtypeStruct((b * t,), jnp.float32),)]
    # One vector for all rows is compiled in: the kernel then loads it once.
    of_parts = "fixed" if all(v.shape[:2] == (1, 1) for each in parts for v in each) else "parts"
    leaves = [specs["rows"]] * sum(map(len, rows)) + [specs[of_parts]] * sum(map(len, parts))
    before = len(leaves) + len(tables)
    leaves += [specs["table"]] * len(tables) + [specs["rows"]] * len(given)
    flat = [each for result in results for each in result]
    found = cutejax.call(
        kernel.run_forward,
        results,
        launch,
        first,
        rows,
        parts,
        tables,
        given,
        in_specs=leaves,
        out_specs=[specs["rows" if len(each.shape) == 3 else "numbers"] for each in flat],
        input_output_aliases={before: 0} if given else None,
        name=name,
        vmap_method="sequential",
    )
    return [each for result in found for each in result]


def backward(
    launch: RowLaunch,
    dy: Rows,
    x: Rows,
    kept: tuple[Array, ...],
    parts: tuple[Array, ...],
    tables: tuple[Array, ...],
) -> tuple[Rows, list[Float[Array, " NH"]]]:
    """Return dx, and the gradients of the vectors in float32; arguments as for `forward`."""
    cutejax, kernel, specs = _cute()
    (b, t, width), dtype = x.shape, jnp.float32
    sums = jax.ShapeDtypeStruct((min(launch.blocks, b * t), 1, width), dtype)
    leaves = [specs["rows"]] * 2 + [specs["numbers"]] * len(kept)
    leaves += [specs["fixed"]] * len(parts) + [specs["table"]] * len(tables)
    dx, *found = cutejax.call(
        kernel.run_backward,
        [_shape(x), *[sums] * len(parts)],
        launch,
        (dy, x),
        kept,
        parts,
        tables,
        in_specs=leaves,
        out_specs=[specs["rows"]] * (1 + len(parts)),
        name="norm_rotary_backward",
        vmap_method="sequential",
    )
    return dx, [each.sum((0, 1)) for each in found]


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _cute() -> tuple[Any, Any, dict[str, Any]]:
    """Import cutejax and the kernel; with them what is fixed when a kernel is compiled.

    XLA hands over slices where they lie: 16 bytes are what the widest load asks of an address.
    """
    import_cute()
    cutejax, kernel = import_module("cutejax"), import_module("maxattn.modules.row_kernel.kernel")
    return (
        cutejax,
        kernel,
        {
            "rows": cutejax.ArraySpec(static_dims=(2,), assumed_align=16),
            "fixed": cutejax.ArraySpec(static_dims=True, assumed_align=16),
            "parts": cutejax.ArraySpec(static_dims=(2, 3), assumed_align=16),
            "table": cutejax.ArraySpec(static_dims=(1,), assumed_align=16),
            "numbers": cutejax.ArraySpec(assumed_align=4),
        },
    )
