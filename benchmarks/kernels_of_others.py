"""TPU kernels of others, for `maxattn compile --estimate --kernel-file`:

    maxattn compile flash_block_sizes.block_q=2048 ... --mask causal \\
        --kernel-file benchmarks/kernels_of_others.py:splash_hsh_scheduled

`flash_block_sizes` sets the tiles. MaxDiffusion's kernels are compiled from its source:
MAXDIFFUSION_KERNEL names its custom_splash_attention.py, MAXDIFFUSION_CROSS its
cross_attention_pallas.py.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from typing import Any

import jax.numpy as jnp

KERNEL, CROSS = "MAXDIFFUSION_KERNEL", "MAXDIFFUSION_CROSS"
PART = 1024  # keys of a tile for which its softmax takes one step: MaxDiffusion's default
VMEM = 60 * 2**20


def _source(key: str) -> Any:
    spec = importlib.util.spec_from_file_location(key.lower(), os.environ[key])
    assert spec and spec.loader, os.environ[key]
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- MaxDiffusion's self-attention ---------------------------------------------------------------


def _custom(q: Any, k: Any, v: Any, config: Any, name: str = "", **flags: Any) -> Any:
    """Run MaxDiffusion's forward, which takes [N, T, H], on a batch of one, padded to the tiles."""
    source, sizes = _source(KERNEL), config.flash_block_sizes
    assert q.shape[0] == 1, "it computes a batch of one"
    blocks = sizes.block_q, sizes.block_kv, sizes.block_kv_compute

    def padded(x: Any, block: int) -> Any:
        rest = -x.shape[1] % block
        return jnp.swapaxes(jnp.pad(x[0], ((0, rest), (0, 0), (0, 0))), 0, 1)

    out = getattr(source, f"_splash_attention_forward{name}")(
        *(padded(x, n) for x, n in ((q, blocks[0]), (k, blocks[1]), (v, blocks[1]))),
        source._BlockSizes(*blocks, min(PART, blocks[2])),
        q_seq_len=q.shape[1],
        kv_seq_len=k.shape[1],
        vmem_limit_bytes=VMEM,
        **flags,
    )
    first = out[0].swapaxes(1, 2) if isinstance(out, tuple) else out  # [N, H, T]
    return jnp.transpose(first, (2, 0, 1))[None].astype(q.dtype)


# A running maximum, normalised in the kernel; and a fixed bound in its place, as in its ring. Its
# Wan configs set the compiler's experimental scheduler.
online = _custom
online_scheduled = partial(_custom, use_experimental_scheduler=True)
ring_scheduled = partial(online_scheduled, name="_ring")  # one hop
bounded = partial(_custom, name="_ring", use_fixed_m=True, uniform_fixed_m=True)
bounded_scheduled = partial(bounded, use_experimental_scheduler=True)


# ---- MaxDiffusion's cross-attention --------------------------------------------------------------


def _cross(q: Any, k: Any, v: Any, config: Any, heads: int) -> Any:
    """Run MaxDiffusion's kernel on flat arrays, with `heads` heads in a step."""
    block = config.flash_block_sizes.block_q
    sizes = {"heads": q.shape[-1] // 128, "head_block": heads, "block_q": block}
    return _source(CROSS).cross_attention_pallas(q, k, v, **sizes)


cross_8_heads = partial(_cross, heads=8)
cross_10_heads = partial(_cross, heads=10)


# ---- tokamax's splash ----------------------------------------------------------------------------


def _splash(q: Any, k: Any, v: Any, config: Any, layouts: str, diag: int = 0, **how: Any) -> Any:
    """Compute causal attention of a batch of one.

    `layouts` has the minor axis of q, k and v: h for the head dim, s for the sequence.
    """
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    assert q.shape[0] == 1, "it computes a batch of one"
    sizes, minor = config.flash_block_sizes, splash.QKVLayout
    names = {"h": minor.HEAD_DIM_MINOR, "s": minor.SEQ_MINOR}
    skip = {"qk_diag_skip": True, "sv_diag_skip": True, "qk_diag_grid": diag} if diag else {}
    settings = splash.SplashConfig(
        sizes.block_q,
        sizes.block_kv,
        sizes.block_kv_compute,
        **{f"{each}_layout": names[a] for each, a in zip("qkv", layouts, strict=True)},
        **skip,
        **how,
    )
    mask = masks.CausalMask((q.shape[1], k.shape[1]))
    kernel = splash.make_splash_mha_single_device(mask, config=settings)
    out: Any = kernel(*(jnp.swapaxes(x[0], 0, 1) for x in (q, k, v)))
    return jnp.swapaxes(out, 0, 1)[None]


_scheduled = partial(_splash, use_experimental_scheduler=True)
splash_hhh_diag4 = partial(_splash, layouts="hhh", diag=4)
splash_hhs_diag2 = partial(_splash, layouts="hhs", diag=2)
splash_hsh_diag4 = partial(_splash, layouts="hsh", diag=4)
splash_hhh_scheduled = partial(_scheduled, layouts="hhh")
splash_hsh_scheduled = partial(_scheduled, layouts="hsh")
splash_hsh_scheduled_stacked4 = partial(_scheduled, layouts="hsh", num_stacked_q_heads=4)
