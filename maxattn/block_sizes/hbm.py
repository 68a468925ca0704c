"""What the fused backward costs in HBM."""

from __future__ import annotations

from maxattn.block_sizes.sizes import ITEMSIZE, BlockSizes, KernelKind, round_up
from maxattn.call import Call
from maxattn.devices import memory_of

MOST_PARTS = 0.1
"""The share of HBM that the parts of dQ may take where nobody asked for them."""
FEW_PARTS = 4  # up to these tokamax keeps the queries' dtype, beyond them float32


def fused_partials_bytes(call: Call, sizes: BlockSizes, kernel: KernelKind = "flash") -> int:
    """Count the bytes of dQ's shares that the fused backward writes to HBM.

    Each KV block writes its own part of dQ, and they are summed afterwards: a longer `block_kv_dkv`
    needs less memory. They have ceil(S / block_kv_dkv) * B * N * T * H elements of the queries'
    dtype, and in tokamax of float32 where there are more than four parts. The separate backward
    writes none.

    Args:
        call: the local call.
        sizes: what it runs with.
        kernel: its name; `tpu_flash` adds to one array, and has no shares.
    """
    if kernel == "tpu_flash" or not sizes.use_fused_bwd_kernel:
        return 0
    if sizes.block_kv_dkv is None or sizes.block_q_dkv is None:
        return 0
    parts = round_up(call.kv_len, sizes.block_kv_dkv) // sizes.block_kv_dkv
    padded = round_up(call.q_len, sizes.block_q_dkv)
    size = ITEMSIZE["float32" if kernel == "tokamax_flash" and parts > FEW_PARTS else call.dtype]
    return parts * call.batch * call.heads * padded * call.head_dim * size


def are_parts_small(call: Call, sizes: BlockSizes, kernel: KernelKind, device_kind: str) -> bool:
    """Tell whether the parts of dQ take little of a device's memory."""
    most = MOST_PARTS * (memory_of(device_kind) or float("inf"))
    return fused_partials_bytes(call, sizes, kernel) <= most
