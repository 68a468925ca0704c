"""Tile lists in a TPU's scalar memory: lists that do not fit are refused before compiling."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn._attention import run
from maxattn.errors import Unsupported
from maxattn.kernels.splash.scalar_memory import MOST_BYTES, list_bytes

TPU = ma.Target.named("TPU v5p")


def _plan(length: int, mask: M.Mask, mesh: dict[str, int] | None = None, **settings: Any) -> Any:
    call = ma.Call(1, length, length, 8, 8, 128, "bfloat16", mask=mask)
    return ma.plan(call, ma.AttentionConfig(**{"attention": "flash"} | settings), mesh, TPU)


def test_bytes_are_those_that_the_compiler_counts() -> None:
    """libtpu 0.0.42: 512 x 512 tiles compile, 580 x 580 need 1.07 MiB of 1."""
    assert list_bytes(512, 512, 2) == 512 * 512 * 3 <= MOST_BYTES
    assert list_bytes(580, 580, 2) == 747_520 + 584 * 640 > MOST_BYTES
    assert list_bytes(600, 600, 2) == 768_000 + 600 * 640


def test_lengths_whose_lists_do_not_fit_are_refused_by_name() -> None:
    assert _plan(2**18, M.Causal()).kernel.blocks.block_q >= 512
    assert _plan(10_000_000, ~M.LocalWindow(40, 20, 0)).kernel.name == "flash"  # none is skipped
    allowed = _plan(10_000_000, M.Causal(), fallback="warn")
    assert allowed.kernel.name == "memory_efficient" and allowed.fell_back
    assert _plan(10_000_000, M.Causal(), attention="auto").kernel.name == "memory_efficient"
    ring = {"context_parallel": "ring"}
    with pytest.raises(Unsupported, match="scalar memory"):
        _plan(10_000_000, M.Causal(), {"context": 4}, **ring)
    assert _plan(1_048_576, M.Causal(), {"context": 8}, **ring).kernel.name == "flash"
    larger = _plan(600_000, M.Causal()).kernel  # nothing was asked: tiles as large as lists need
    assert min(larger.blocks.block_q, larger.blocks.block_kv) > 512
    assert larger.inference_changes == ()


SMALL = {"block_q": 256, "block_kv": 256, "block_kv_compute": 256}


@pytest.mark.parametrize("kernel", ["flash", "tpu_flash"])
def test_lists_that_do_not_fit_are_refused_by_their_setting(kernel: str) -> None:
    assert _plan(2**18, M.Causal(), attention=kernel).kernel.name == kernel
    assert _plan(10_000_000, M.Full(), attention=kernel).kernel.name == kernel  # no lists
    with pytest.raises(Unsupported, match=rf"(?s)scalar memory, which has {MOST_BYTES} bytes"):
        _plan(10_000_000, M.Causal(), attention=kernel)
    with pytest.raises(Unsupported, match=r"(?s)flash_block_sizes: 256 queries x 256 keys"):
        _plan(2**18, M.Causal(), attention=kernel, flash_block_sizes=SMALL)


def test_a_backward_that_needs_more_is_refused_before_the_compiler() -> None:
    """A window has short lists in the forward, but the fused backward lists every tile."""
    length, mask = 2**19, M.LocalWindow(1000, 0)
    sizes = {"block_q": 512, "block_kv": 512, "block_kv_compute": 512, "use_fused_bwd_kernel": True}
    plan = _plan(length, mask, flash_block_sizes=sizes)
    x = jax.ShapeDtypeStruct((1, length, 8, 128), "bfloat16")
    bound = mask.bind(length, length, 1, 8)

    def forward(q: Any, k: Any, v: Any) -> Any:
        return run(plan, q, k, v, None, bound)[0]

    def step(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(forward, q, k, v)
        return pull(out)

    assert jax.eval_shape(forward, x, x, x).shape == x.shape
    with pytest.raises(Unsupported, match=r"(?s)flash_block_sizes.*scalar memory"):
        jax.eval_shape(step, x, x, x)
