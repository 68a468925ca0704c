"""What differs between the versions of jax that maxattn supports (0.10.2 to 0.12), in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import AxisType, Mesh


def auto_mesh(devices: np.ndarray, axis_names: Sequence[str]) -> Mesh:
    """Build a mesh whose axes the compiler may use freely (newer jax makes Explicit axes by default)."""
    return Mesh(devices, tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names))


def shard_map(
    f: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, axis_names: set[str]
) -> Callable[..., Any]:
    """Map `f` over shards, with the varying-axes check off: Pallas kernels raise under it."""
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False)


def ambient_mesh() -> Any:
    """Return the mesh of the surrounding `shard_map`, `jax.set_mesh` or `with mesh:`, or None where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return _entered_mesh() if mesh is None or mesh.empty else mesh


def _entered_mesh() -> Mesh | None:
    """Return the mesh of a `with mesh:`, which jax has no public name for any more."""
    from jax._src import mesh as private

    resources = getattr(private, "thread_resources", None)
    mesh = None if resources is None else resources.env.physical_mesh
    return None if mesh is None or mesh.empty else mesh


def axis_names_of_type(mesh: Any, kind: AxisType) -> frozenset[str]:
    """Name the axes of a mesh that have the given type (Auto, Explicit or Manual)."""
    types = getattr(mesh, "axis_types", None) or ()
    return frozenset(name for name, t in zip(mesh.axis_names, types, strict=False) if t == kind)


def is_tracer(x: object) -> bool:
    """Say whether a value is being traced, so that its entries cannot be looked at."""
    return isinstance(x, jax.core.Tracer)


# ---- Pallas for Triton -----------------------------------------------------------------------------------------------
# Deprecated since jax 0.11, in favour of kernels in Mosaic: where it is gone, XLA does what the kernels did.


def triton_there() -> bool:
    """Say whether Pallas lowers for Triton here: newer jax asks the GPU, or an `AbstractDevice`, for its kind."""
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return False
    if not takes_triton(getattr(jax.local_devices()[0], "compute_capability", None)):
        return False
    asks = getattr(triton, "get_gpu_info", None)
    if asks is None:
        return True
    try:
        asks()
    except ValueError:
        return False
    return True


def takes_triton(capability: str | None) -> bool:
    """Say whether XLA compiles Triton's kernels for such a GPU: NVIDIA's from Ampere (8.0) on; None is no GPU's."""
    return capability is None or (capability.replace(".", "", 1).isdecimal() and float(capability) >= 8.0)


def triton_params(warps: int) -> Any:
    """Make the parameters of a Pallas kernel for Triton, a program of which runs on so many warps of 32 threads."""
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps)


def triton_split(x: Any) -> tuple[Any, Any]:
    """Split [..., 2] into its two parts inside of such a kernel."""
    a, b = jax.lax.split(x, (1, 1), axis=x.ndim - 1)
    return a.reshape(x.shape[:-1]), b.reshape(x.shape[:-1])


# ---- splash attention ------------------------------------------------------------------------------------------------
# Its forward and its two backward kernels are private functions, with the same arguments in jax 0.10.2 to 0.12; its
# public function hides them behind a custom_vjp that takes neither a given LSE nor a gradient of the LSE.


def _splash() -> Any:
    # Imported here, since Pallas takes longer to import than the rest of maxattn together.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def splash_mask_info(data_next: Any, block_mask: Any, q_sequence: Any) -> Any:
    """Make splash's `MaskInfo` of a mask that is computed inside the kernel."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    return MaskInfo(data_next, None, block_mask, None, q_sequence)


def splash_segment_ids(q: Any, kv: Any) -> Any:
    """Make splash's pair of segment ids."""
    return _splash().SegmentIds(q, kv)


def splash_forward(
    q: Any, k: Any, v: Any, ids: Any, info: Any, mask_function: Any, blocks: tuple[int, ...], interpret: bool
) -> tuple[Any, Any]:
    """Run the forward kernel on one batch row: (out [N, T, H], lse [N, T]); blocks are (q, kv, kv_compute)."""
    splash = _splash()
    out, (lse,) = splash._splash_attention_forward(
        info, q, k, v, ids, None, mask_value=splash.DEFAULT_MASK_VALUE, is_mqa=False,
        block_sizes=splash.BlockSizes(*blocks), residual_checkpoint_name=None, save_residuals=True,
        mask_function=mask_function, interpret=interpret,
    )  # fmt: skip
    return out, lse


def splash_dkv(
    q: Any, k: Any, v: Any, ids: Any, rows: tuple[Any, Any, Any], info: Any, mask_function: Any,
    blocks: tuple[int, ...], fused: bool, interpret: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Run the backward kernel of K and V on one batch row: (dq when fused else None, dk, dv).

    `rows` are (lse, dout, delta), as for `splash_dq`.
    """
    bq, bkv, compute = blocks
    return _splash()._splash_attention_bwd_dkv(
        q, k, v, ids, None, *rows, bq=bq, bkv=bkv, bkv_compute=compute, mask_info=info,
        use_fused_bwd_kernel=fused, **_splash_backward_settings(mask_function, interpret),
    )  # fmt: skip


def splash_dq(
    q: Any, k: Any, v: Any, ids: Any, rows: tuple[Any, Any, Any], info: Any, mask_function: Any,
    blocks: tuple[int, ...], interpret: bool,
) -> Any:  # fmt: skip
    """Run the backward kernel of Q on one batch row."""
    return _splash()._splash_attention_bwd_dq(
        q, k, v, ids, None, *rows, bq=blocks[0], bkv=blocks[1], mask_info=info,
        **_splash_backward_settings(mask_function, interpret),
    )  # fmt: skip


def _splash_backward_settings(mask_function: Any, interpret: bool) -> dict[str, Any]:
    splash = _splash()
    layout = splash.QKVLayout.HEAD_DIM_MINOR
    return {
        "is_mqa": False, "mask_value": splash.DEFAULT_MASK_VALUE, "attn_logits_soft_cap": None, "q_layout": layout,
        "k_layout": layout, "v_layout": layout, "mask_function": mask_function, "interpret": interpret,
    }  # fmt: skip
