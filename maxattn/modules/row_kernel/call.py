"""Calls of the row kernel from jax, through cutejax, and the conditions under which it runs."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import jax
from jaxtyping import Array, Float

from maxattn.jax_private.cute import import_cute
from maxattn.jax_private.mesh import ambient_mesh
from maxattn.jax_private.varying import checked_axes
from maxattn.kernels.flash import has_fa4
from maxattn.modules.row_kernel.work import RowLaunch
from maxattn.sharding import surrounding_manual_axes
from maxattn.target import Target

Rows = Float[Array, "B T NH"]


def why_not(target: Target, mesh: Any) -> str:
    """Return why the kernel cannot run on an NVIDIA GPU, or "" if it can."""
    if target.version("fa4-jax") is None:
        return "fa4-jax is not installed"
    if not has_fa4(target):
        return f"fa4-jax has no kernels for {target.device_kind}"
    for package in ("fa4-jax", "nvidia-cutlass-dsl"):
        if reason := target.refuse_untested("norm and rotary embedding", package):
            return reason.rule
    return why_not_here(mesh)


def why_not_here(mesh: Any) -> str:
    """Return why no kernel can run in the surrounding function, or "" if one can."""
    ambient, manual = ambient_mesh(), surrounding_manual_axes()
    if checked_axes(manual):
        return "the surrounding shard_map has check_vma=True"
    sizes = [jax.device_count()]
    if ambient is not None:
        sizes = [n for axis, n in ambient.shape.items() if axis not in manual]
    # Without a mesh XLA would gather the kernel's operands.
    if mesh is None and max(sizes, default=1) > 1:
        return "arrays may be split over several devices, and the module has no mesh="
    return ""


def norm_rows(
    launch: RowLaunch,
    rows: tuple[Rows, ...],
    parts: tuple[Array, ...],
    tables: tuple[Array, ...] = (),
    name: str = "norm_rotary",
) -> list[Rows]:
    """Compute z = x + bias or other + gate * (x + bias), and y = rotate(norm(z) * scale + shift).

    Return [y], or [y, z] if `rows` has two arrays.

    Args:
        rows: (x,) or (other, x), each [B, T, N H].
        parts: the vectors' arrays, [B or 1, F or 1, R, N H], or [1, 1, 1, H] for all heads, in the
            order of `launch.work.vectors`. All arrays with F > 1 have the same F, which divides T.
        tables: cosines and sines in float32, [L, H/2], where L divides B T; or none.
    """
    import_cute()
    results, operands = [rows[0]] * len(rows), (rows, parts, tables)
    return import_module("cutejax").call(
        import_module("maxattn.modules.row_kernel.kernel").run,
        *(results, launch, *operands),
        in_specs=_specs(operands),
        out_specs=_specs(results),
        name=name,
        vmap_method="sequential",
    )


def _specs(operands: Any) -> list[Any]:
    """Describe operands to the compiler, and name the sizes that are compiled as constants.

    Constants are the channels of rows [B, T, N H] and of tables [L, H/2], and the whole shape of a
    vector [1, 1, R, N H] that all rows share.
    """
    # The widest load needs addresses that 16 divides; XLA passes slices without a copy.
    spec = partial(import_module("cutejax").ArraySpec, assumed_align=16)
    shapes = (x.shape for x in jax.tree.leaves(operands))
    fixed = ({2: (1,), 3: (2,), 4: x[:2] == (1, 1) or (2, 3)}[len(x)] for x in shapes)
    return [spec(static_dims=x) for x in fixed]
