"""Which kernel of norm and rotary embedding runs here, and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.jax_private.mesh import ambient_mesh, axis_names_of_type
from maxattn.jax_private.triton import takes_triton, triton_there
from maxattn.jax_private.varying import checked_axes
from maxattn.kernels.flash import has_fa4
from maxattn.modules.norm_rope import cute_launch
from maxattn.modules.norm_rope.cute_threads import CuteThreads
from maxattn.modules.norm_rope.row import NormRopeRow
from maxattn.modules.norm_rope.triton_row import TritonRow
from maxattn.target import Target

DTYPES = ("bfloat16", "float16", "float32")


class NormRopePath(NamedTuple):
    """Hold what norms and rotates queries or keys.

    Args:
        name: "triton" (Pallas for Triton), "cute" (CuTe, through fa4-jax) or "xla".
        because: why it is not a kernel, in a few words; empty for a kernel.
    """

    name: str
    because: str = ""

    @property
    def is_kernel(self) -> bool:
        """Tell whether one kernel does it."""
        return self.name != "xla"

    @property
    def note(self) -> str:
        """Say it in a line of a plan; empty where there is no GPU of NVIDIA's."""
        what = "norm and rotary embedding"
        if self.is_kernel:
            return f"{what} in one kernel, {_LANGUAGE[self.name]}"
        return f"{what} by XLA, step by step: {self.because}" if self.because else ""


_LANGUAGE = {"triton": "written in Pallas for Triton", "cute": "written in CuTe"}


def path_here(
    row: NormRopeRow | None, x: Float[Array, "B T C"], mesh: Any, letters: str = "BTNH"
) -> NormRopePath:
    """Return what norms and rotates such rows here.

    A kernel does on NVIDIA GPUs, where each device has whole rows, all equally many.

    Args:
        row: from `fused_row`.
        x: what is projected to the rows.
        mesh: the module's.
        letters: of the result's axes.
    """
    if Target.here().device.vendor != "NVIDIA":
        return NormRopePath("xla")
    why = _no_kernel(row, x, mesh, letters)
    if why or row is None:
        return NormRopePath("xla", why)
    return _kernel_for(row.on_device(letters, sharding.mesh_shape(mesh)), x.dtype.name)


def _no_kernel(row: NormRopeRow | None, x: Array, mesh: Any, letters: str) -> str:
    """Say why no kernel may run, whatever it is written in; empty where one may."""
    if row is None:
        return "the kernels take RMS norms, and angles that all heads share, of all channels"
    if x.dtype.name not in DTYPES:
        return f"the kernels take {', '.join(DTYPES)}, and this is {x.dtype.name}"
    if checked():
        return "the surrounding shard_map checks what varies (check_vma)"
    if mesh is None and may_be_spread():
        return "arrays may lie over several devices, and the module has no mesh="
    return _uneven(row, x, sharding.mesh_shape(mesh), letters)


def _uneven(row: NormRopeRow, x: Array, shape: sharding.MeshShape, letters: str) -> str:
    """Say which devices would have no whole rows, or fewer rows than others."""
    if row.norm == "across" and sharding.ways("N", shape) > 1:
        return "the norm goes over heads of several devices"
    sizes = zip(letters, (*x.shape[:2], row.heads), strict=False)
    odd = [letter for letter, n in sizes if n % sharding.ways(letter, shape)]
    return f"axis {odd[0]} does not divide over the mesh" if odd else ""


_NAMED: ContextVar[tuple[str, ...] | None] = ContextVar("kernels, best first", default=None)


@contextmanager
def only(*names: str) -> Iterator[None]:
    """Let the named kernels alone be chosen from inside a `with`: to measure one beside another.

    Args:
        names: "triton", "cute", best first; none for XLA's steps.
    """
    token = _NAMED.set(names)
    try:
        yield
    finally:
        _NAMED.reset(token)


def kernels_here(row: NormRopeRow, dtype: str) -> tuple[str, ...]:
    """Return the kernels that take such rows on this machine, best first.

    Args:
        row: of one device.
        dtype: of its numbers.
    """
    if Target.here().device.vendor != "NVIDIA":
        return ()
    takes = {
        "triton": triton_there() and TritonRow.of(row).fits(),
        "cute": cute_there() and cute_takes(row),
    }
    named = _NAMED.get()
    names = _best_first(dtype) if named is None else named
    return tuple(name for name in names if takes[name])


def cute_takes(row: NormRopeRow) -> bool:
    """Say whether CuTe's kernels take such rows on this GPU."""
    return cute_launch.fits(CuteThreads.of(row), Target.here().device.family.shared_memory)


def _best_first(dtype: str) -> tuple[str, ...]:
    """Order the kernels: on Hopper GPUs CuTe's are faster in 16 bits, and Triton's in float32.

    Elsewhere nobody measured them.
    """
    names = tuple(_LANGUAGE)
    is_faster = Target.here().device.is_a("hopper") and dtype != "float32"
    return names[::-1] if is_faster else names


def _kernel_for(row: NormRopeRow, dtype: str) -> NormRopePath:
    for name in kernels_here(row, dtype):
        return NormRopePath(name)
    return NormRopePath("xla", f"no kernel here takes rows of {row.heads} x {row.head_dim}")


def cute_there() -> bool:
    """Say whether fa4-jax is here, which brings CuTe, and the GPU takes such kernels."""
    here, gpu = Target.here(), jax.local_devices()[0]
    if not has_fa4(here) or here.refuse_untested("flash", "fa4-jax"):
        return False
    return takes_triton(getattr(gpu, "compute_capability", None))


def may_be_spread() -> bool:
    """Say whether jax may lay out arrays over devices that nobody names.

    It would gather what the kernel reads.
    """
    ambient = ambient_mesh()
    if ambient is None:
        return _devices() > 1
    kinds = AxisType.Auto, AxisType.Explicit
    left = frozenset[str]().union(*(axis_names_of_type(ambient, kind) for kind in kinds))
    return any(ambient.shape[a] > 1 for a in left)


def _devices() -> int:
    return jax.device_count()


def checked() -> bool:
    """Say whether a surrounding `shard_map` checks what varies: the kernels do not say so."""
    ambient = ambient_mesh()
    return ambient is not None and bool(checked_axes(axis_names_of_type(ambient, AxisType.Manual)))
