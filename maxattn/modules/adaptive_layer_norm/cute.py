"""The adaptive norm in one pass over memory: a CuTe kernel, launched through fa4-jax's cutejax."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import jax
from jaxtyping import Array, Float

from maxattn.kernels.fa4.cute_packages import import_cute
from maxattn.modules.adaptive_layer_norm.threads import NormLaunch, NormThreads
from maxattn.modules.adaptive_layer_norm.vectors import VectorParts
from maxattn.target import Target

Vectors = tuple[tuple[str, VectorParts], ...]


def forward(
    launch: NormLaunch,
    rows: tuple[Float[Array, "B T D"], ...],
    parts: tuple[Float[Array, "#B #F R D"], ...],
) -> tuple[Float[Array, "B T D"], ...]:
    """Run the kernel: the normed rows, and the sums before the norm where there is a branch.

    Args:
        launch: from `launch_of`.
        rows: x, and the branch that is added to it before the norm, where there is one.
        parts: of the vectors, in the order of `launch.vectors`; F is one number for all that have
            frames, and divides T: neighbouring T / F rows share theirs.
    """
    out = jax.ShapeDtypeStruct(rows[0].shape, rows[0].dtype)
    of_rows, of_parts = _specs()
    return import_module("cutejax").call(
        run,
        [out] * len(rows),
        _kernel(launch),
        rows,
        parts,
        in_specs=[of_rows] * len(rows) + [of_parts] * len(parts),
        out_specs=[of_rows] * len(rows),
        name="adaptive_norm",
        vmap_method="sequential",
    )


def run(stream: Any, kernel: Any, rows: Any, parts: Any, *results: Any) -> None:
    """Launch it while it is compiled."""
    kernel(rows, parts, results, stream)


def launch_of(eps: float, rows: tuple[Any, ...], vectors: Vectors) -> NormLaunch:
    """Return how rows are shared among the blocks of this GPU.

    Args:
        eps: added to the variance.
        rows: as for `forward`; their shapes and dtypes suffice.
        vectors: their parts, by name.
    """
    gpu = Target.here().device
    widths = tuple(each.dtype.itemsize for each in rows)
    threads = NormThreads(rows[0].shape[-1])
    return NormLaunch(threads, eps, vectors, widths, gpu.sms, gpu.family.shared_memory)


@lru_cache(maxsize=256)
def _kernel(launch: NormLaunch) -> Any:
    import_cute()
    kernels = import_module("maxattn.modules.adaptive_layer_norm.cute_kernels")
    return kernels.AdaptiveNorm(launch)


def _specs() -> tuple[Any, Any]:
    """Say what of rows and of vectors is fixed when a kernel is compiled.

    XLA hands over slices where they lie: 16 bytes are what the widest load asks of an address.
    """
    import_cute()
    spec = import_module("cutejax").ArraySpec
    rows = spec(static_dims=(2,), assumed_align=16)
    return rows, spec(static_dims=(2, 3), assumed_align=16)
