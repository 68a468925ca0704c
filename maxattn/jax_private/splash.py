"""The private kernels of JAX's splash attention, with the same arguments in jax 0.10.2 to 0.12.

The public function has a custom_vjp that takes neither a given LSE nor a gradient of the LSE.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Operands = tuple[Any, Any, Any, Any]
"""q [N, T, H], k and v [K, S, H], and (ids of queries, ids of keys) or None, of one batch row."""


class SplashLaunch(NamedTuple):
    """A launch: blocks (q, kv) or (q, kv, kv_compute), mask (None: all pairs), if interpreted."""

    info: Any
    mask_function: Any
    blocks: tuple[int, ...]
    interpret: bool


def _splash() -> Any:
    # Imported here, since Pallas takes longer to import than the rest of maxattn together.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def mask_info(data_next: Any, block_mask: Any, q_sequence: Any) -> Any:
    """Return splash's `MaskInfo` for a mask that the kernel evaluates."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    return MaskInfo(data_next, None, block_mask, None, q_sequence)


def forward(operands: Operands, launch: SplashLaunch) -> tuple[Any, Any]:
    """Run the forward kernel on one batch row: (out [N, T, H], lse [N, T])."""
    splash = _splash()
    settings = {"residual_checkpoint_name": None, "save_residuals": True, **_settings(launch)}
    blocks = splash.BlockSizes(*launch.blocks)
    run, given = splash._splash_attention_forward, _with_ids(operands)
    out, (lse,) = run(launch.info, *given, None, block_sizes=blocks, **settings)
    return out, lse


def dkv(operands: Operands, stats: Any, launch: SplashLaunch, fused: bool) -> tuple[Any, Any, Any]:
    """Run the backward of K and V on one batch row: (dq if fused else None, dk, dv)."""
    bq, bkv, compute = launch.blocks
    sizes = {"bq": bq, "bkv": bkv, "bkv_compute": compute, "use_fused_bwd_kernel": fused}
    run = _splash()._splash_attention_bwd_dkv
    return run(*_with_ids(operands), None, *stats, **sizes, **_backward_settings(launch))


def dq(operands: Operands, stats: Any, launch: SplashLaunch) -> Any:
    """Run the backward kernel of Q on one batch row."""
    sizes = dict(zip(("bq", "bkv"), launch.blocks, strict=True))
    run = _splash()._splash_attention_bwd_dq
    return run(*_with_ids(operands), None, *stats, **sizes, **_backward_settings(launch))


def _with_ids(operands: Operands) -> Operands:
    q, k, v, ids = operands
    return q, k, v, None if ids is None else _splash().SegmentIds(*ids)


def _settings(launch: SplashLaunch) -> dict[str, Any]:
    return {
        "is_mqa": False,
        "mask_value": _splash().DEFAULT_MASK_VALUE,
        "mask_function": launch.mask_function,
        "interpret": launch.interpret,
    }


def _backward_settings(launch: SplashLaunch) -> dict[str, Any]:
    layouts = dict.fromkeys(
        ("q_layout", "k_layout", "v_layout"), _splash().QKVLayout.HEAD_DIM_MINOR
    )
    own = {"mask_info": launch.info, "attn_logits_soft_cap": None}
    return {**own, **layouts, **_settings(launch)}
