"""JAX's splash attention.

Its forward and its two backward kernels are private functions, with the same arguments in jax
0.10.2 to 0.12. Its public function hides them behind a custom_vjp that takes neither a given LSE
nor a gradient of the LSE.
"""

from __future__ import annotations

from typing import Any


def _splash() -> Any:
    # Imported here, since Pallas takes longer to import than the rest of maxattn together.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def mask_info(data_next: Any, block_mask: Any, q_sequence: Any) -> Any:
    """Make splash's `MaskInfo` of a mask that is computed inside the kernel."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    return MaskInfo(data_next, None, block_mask, None, q_sequence)


def segment_ids(q: Any, kv: Any) -> Any:
    """Make splash's pair of segment ids."""
    return _splash().SegmentIds(q, kv)


def forward(
    q: Any,
    k: Any,
    v: Any,
    ids: Any,
    info: Any,
    mask_function: Any,
    blocks: tuple[int, ...],
    interpret: bool,
) -> tuple[Any, Any]:
    """Run the forward kernel on one batch row: (out [N, T, H], lse [N, T]); blocks are (q, kv,
    kv_compute).
    """
    splash = _splash()
    out, (lse,) = splash._splash_attention_forward(
        info,
        q,
        k,
        v,
        ids,
        None,
        mask_value=splash.DEFAULT_MASK_VALUE,
        is_mqa=False,
        block_sizes=splash.BlockSizes(*blocks),
        residual_checkpoint_name=None,
        save_residuals=True,
        mask_function=mask_function,
        interpret=interpret,
    )
    return out, lse


def dkv(
    q: Any,
    k: Any,
    v: Any,
    ids: Any,
    rows: tuple[Any, Any, Any],
    info: Any,
    mask_function: Any,
    blocks: tuple[int, ...],
    fused: bool,
    interpret: bool,
) -> tuple[Any, Any, Any]:
    """Run the backward kernel of K and V on one batch row: (dq when fused else None, dk, dv).

    `rows` are (lse, dout, delta), as for `splash_dq`.
    """
    bq, bkv, compute = blocks
    return _splash()._splash_attention_bwd_dkv(
        q,
        k,
        v,
        ids,
        None,
        *rows,
        bq=bq,
        bkv=bkv,
        bkv_compute=compute,
        mask_info=info,
        use_fused_bwd_kernel=fused,
        **_backward_settings(mask_function, interpret),
    )


def dq(
    q: Any,
    k: Any,
    v: Any,
    ids: Any,
    rows: tuple[Any, Any, Any],
    info: Any,
    mask_function: Any,
    blocks: tuple[int, ...],
    interpret: bool,
) -> Any:
    """Run the backward kernel of Q on one batch row."""
    return _splash()._splash_attention_bwd_dq(
        q,
        k,
        v,
        ids,
        None,
        *rows,
        bq=blocks[0],
        bkv=blocks[1],
        mask_info=info,
        **_backward_settings(mask_function, interpret),
    )


def _backward_settings(mask_function: Any, interpret: bool) -> dict[str, Any]:
    splash = _splash()
    layout = splash.QKVLayout.HEAD_DIM_MINOR
    return {
        "is_mqa": False,
        "mask_value": splash.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": None,
        "q_layout": layout,
        "k_layout": layout,
        "v_layout": layout,
        "mask_function": mask_function,
        "interpret": interpret,
    }
