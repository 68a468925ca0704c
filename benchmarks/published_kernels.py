"""TPU kernels that others measured, for `maxattn compile --estimate --kernel-file`:

    maxattn compile flash_block_sizes.block_q=2048 ... --mask causal \\
        --kernel-file benchmarks/published_kernels.py:splash_hsh_scheduled

The names of tokamax's splash have the layouts of q, k and v (h: head dim minor, s: sequence minor)
and the settings. MaxDiffusion's cross-attention is compiled from the source file at
MAXDIFFUSION_CROSS. `flash_block_sizes` sets the tiles.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from typing import Any

import jax.numpy as jnp

CROSS_KEY = "MAXDIFFUSION_CROSS"


def _splash(q: Any, k: Any, v: Any, config: Any, layouts: str, diag: int = 0, **how: Any) -> Any:
    """Compute causal attention of a batch of one."""
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


def _cross(q: Any, k: Any, v: Any, config: Any, heads: int) -> Any:
    """Run MaxDiffusion's kernel on flat arrays, with `heads` heads in a step."""
    spec = importlib.util.spec_from_file_location("cross_attention_pallas", os.environ[CROSS_KEY])
    assert spec and spec.loader, os.environ[CROSS_KEY]
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    block = config.flash_block_sizes.block_q
    sizes = {"heads": q.shape[-1] // 128, "head_block": heads, "block_q": block}
    return module.cross_attention_pallas(q, k, v, **sizes)


cross_8_heads = partial(_cross, heads=8)
cross_10_heads = partial(_cross, heads=10)
