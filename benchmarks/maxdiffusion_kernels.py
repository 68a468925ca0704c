"""MaxDiffusion's own kernels, for `maxattn compile --estimate --kernel-file`.

MAXDIFFUSION_KERNEL is the path of its custom_splash_attention.py:

    MAXDIFFUSION_KERNEL=.../custom_splash_attention.py maxattn compile base_wan_14b.yml ... \\
        --kernel-file benchmarks/maxdiffusion_kernels.py:online

`flash_block_sizes` sets the tiles. Lengths are padded to them, as in its own code.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import jax.numpy as jnp

PART = 1024  # of a tile's keys, for which its softmax takes one step: its default
VMEM = 60 * 2**20
KEY = "MAXDIFFUSION_KERNEL"


def online(q: Any, k: Any, v: Any, config: Any) -> Any:
    """Compute attention with a running maximum, and normalise in the kernel."""
    return _run("_splash_attention_forward", q, k, v, config)


def online_scheduled(q: Any, k: Any, v: Any, config: Any) -> Any:
    """Compute `online` with the compiler's experimental scheduler, as its Wan configs set it."""
    return _run("_splash_attention_forward", q, k, v, config, use_experimental_scheduler=True)


def ring_scheduled(q: Any, k: Any, v: Any, config: Any) -> Any:
    """Compute one hop of its ring, with a running maximum and the experimental scheduler."""
    name = "_splash_attention_forward_ring"
    return _run(name, q, k, v, config, use_experimental_scheduler=True)


def bounded(q: Any, k: Any, v: Any, config: Any) -> Any:
    """Compute attention with a fixed bound in place of the running maximum, as in its ring."""
    flags = {"use_fixed_m": True, "uniform_fixed_m": True}
    return _run("_splash_attention_forward_ring", q, k, v, config, **flags)


def bounded_scheduled(q: Any, k: Any, v: Any, config: Any) -> Any:
    """Compute `bounded` with the compiler's experimental scheduler."""
    flags = {"use_fixed_m": True, "uniform_fixed_m": True, "use_experimental_scheduler": True}
    return _run("_splash_attention_forward_ring", q, k, v, config, **flags)


def _run(name: str, q: Any, k: Any, v: Any, config: Any, **flags: Any) -> Any:
    """Run one of its functions, which take [N, T, H], on a batch of one."""
    source, sizes = _source(), config.flash_block_sizes
    assert q.shape[0] == 1, "it computes a batch of one"
    blocks = sizes.block_q, sizes.block_kv, sizes.block_kv_compute
    t, s = q.shape[1], k.shape[1]
    padded = (_padded(x, n) for x, n in ((q, blocks[0]), (k, blocks[1]), (v, blocks[1])))
    out = getattr(source, name)(
        *padded,
        source._BlockSizes(*blocks, min(PART, blocks[2])),
        q_seq_len=t,
        kv_seq_len=s,
        vmem_limit_bytes=VMEM,
        **flags,
    )
    first = out[0].swapaxes(1, 2) if isinstance(out, tuple) else out  # [N, H, T]
    return jnp.transpose(first, (2, 0, 1))[None].astype(q.dtype)


def _padded(x: Any, block: int) -> Any:
    """Return [N, T, H], with T padded to a multiple of the block."""
    rest = -x.shape[1] % block
    return jnp.swapaxes(jnp.pad(x[0], ((0, rest), (0, 0), (0, 0))), 0, 1)


def _source() -> Any:
    spec = importlib.util.spec_from_file_location("custom_splash_attention", os.environ[KEY])
    assert spec and spec.loader, os.environ[KEY]
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
