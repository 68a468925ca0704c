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
Jobs = tuple[Any, ...]
"""One array, or those of two jobs that share a launch: queries and keys."""


def why_not(target: Target, mesh: Any) -> str:
    """Say why the kernel cannot run on an NVIDIA GPU, whatever the rows; empty where it can."""
    if target.version("fa4-jax") is None:
        return "fa4-jax is not installed"
    if not has_fa4(target):
        return f"fa4-jax has no kernels for {target.device_kind}"
    for package in ("fa4-jax", "nvidia-cutlass-dsl"):
        if reason := target.refuse_untested("norm and rotary embedding", package):
            return reason.rule
    ambient = ambient_mesh()
    manual = frozenset() if ambient is None else axis_names_of_type(ambient, AxisType.Manual)
    if checked_axes(manual):
        return "the surrounding shard_map checks what varies (check_vma)"
    sizes = [jax.device_count()]
    if ambient is not None:
        sizes = [n for axis, n in ambient.shape.items() if axis not in manual]
    # XLA would gather what the kernel reads.
    if mesh is None and max(sizes, default=1) > 1:
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
        rows: x, [B, T, N H] of each job; before it, what it is added to.
        parts: of the vectors, [B or 1, F or 1, R, N H], or [1, 1, 1, H] for all heads, in the order
            of `launch.work.vectors`. F is one number for all that have frames, and divides T.
        tables: cosines and sines in float32, [L, H/2], L dividing B T; or none.
        keep: whether to return 1 / root of a norm across heads, [B T].
        first: where an example's rows begin in `into`.
        into: a longer sequence, whose memory is y's; or its shape, and the rest is undefined.

    Returns:
        y of each job; then what was normed, z, where x is added to something; then 1 / root.
    """
    import_cute()
    kernel = import_module("maxattn.modules.row_kernel.kernel")
    x, given = rows[0], () if into is None or isinstance(into, jax.ShapeDtypeStruct) else (into,)
    y = tuple(each if into is None else into for each in x)
    kept = jax.ShapeDtypeStruct((x[0].shape[0] * x[0].shape[1],), jnp.float32)
    results = [y, *([y] if len(rows) > 1 else [])]
    results += [(kept,)] if keep and launch.work.norm == "across" else []
    found = import_module("cutejax").call(
        kernel.run_forward,
        results,
        launch,
        first,
        rows,
        parts,
        tables,
        given,
        in_specs=_specs(rows, parts, tables, given),
        out_specs=_specs(results),
        input_output_aliases={len(jax.tree.leaves((rows, parts, tables))): 0} if given else None,
        name=name,
        vmap_method="sequential",
    )
    return [each for result in found for each in result]


def backward(
    launch: RowLaunch, dy: Rows, x: Rows, kept: Jobs, parts: Jobs, tables: Jobs
) -> tuple[Rows, list[Float[Array, " NH"]]]:
    """Return dx, and the gradients of the vectors in float32; arguments as for `forward`."""
    import_cute()
    kernel = import_module("maxattn.modules.row_kernel.kernel")
    b, t, width = x.shape
    total = jax.ShapeDtypeStruct((min(launch.blocks, b * t), 1, width), jnp.float32)
    results = [x, *[total] * len(parts)]
    dx, *found = import_module("cutejax").call(
        kernel.run_backward,
        results,
        launch,
        (dy, x),
        kept,
        parts,
        tables,
        in_specs=_specs(dy, x, kept, parts, tables),
        out_specs=_specs(results),
        name="norm_rotary_backward",
        vmap_method="sequential",
    )
    return dx, [each.sum((0, 1)) for each in found]


def _specs(*operands: Any) -> list[Any]:
    """Return which sizes are fixed when a kernel is compiled: the channels of rows [B, T, N H] and
    of tables [L, H/2], and all of a vector [1, 1, R, N H] that all rows share.
    """
    spec, found = import_module("cutejax").ArraySpec, []
    for x in jax.tree.leaves(operands):
        fixed = {1: (), 2: (1,), 3: (2,), 4: x.shape[:2] == (1, 1) or (2, 3)}[len(x.shape)]
        # XLA hands over slices where they lie: the widest load asks an address for 16 bytes.
        found.append(spec(static_dims=fixed, assumed_align=4 if len(x.shape) == 1 else 16))
    return found
