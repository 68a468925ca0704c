"""maxattn's copy of tokamax's dK and dV kernel has a fence after its last reads."""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp
import pytest

from maxattn.jax_private.versions import TOKAMAX_ON_GPU, numbers
from tests.jaxprs import equations

FENCE = {"inline_mgpu_p", "inline_mgpu"}  # its name before jax 0.12 and since
BLOCKS = {"block_q_dkv": 64, "block_kv_dkv": 64, "block_q_dq": 64, "block_kv_dq": 64}


def primitives(kernels) -> list[str]:
    """Trace the backward, and list what its kernels do, in order."""
    x, rows = (
        jax.ShapeDtypeStruct((256, 2, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 256), jnp.float32),
    )
    run = partial(
        kernels.flash_attention_vjp_kernel,
        is_causal=False,
        logits_scale=1.0,
        logits_soft_cap=None,
        ds_dtype=None,
        config=kernels.Config(**BLOCKS),
    )
    traced = jax.make_jaxpr(lambda q, k, v, r, o, d: run(q, k, v, r, o, d, None, None, None, None))
    return [e.primitive.name for e in equations(traced(x, x, x, (rows, rows), x, x).jaxpr)]


def test_one_fence_before_places_are_free_again() -> None:
    try:
        found = version("tokamax")
    except PackageNotFoundError:
        pytest.skip("tokamax is not installed")
    if numbers(found) < numbers(TOKAMAX_ON_GPU):
        taken = f"maxattn takes it from {TOKAMAX_ON_GPU} on"
        pytest.skip(f"tokamax {found} has another backward for GPUs; {taken}")
    from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp_kernel_sm90 as theirs

    from maxattn.kernels.fused.tokamax_fence import backward_module

    ours = primitives(backward_module().sm90)
    assert not FENCE & set(primitives(theirs))
    (at,) = (i for i, name in enumerate(ours) if name in FENCE)
    assert ours[at + 1] == "barrier_arrive"
    assert "load" in ours[at - 6 : at]
    assert "barrier_arrive" not in ours[at - 6 : at]
