"""FlashAttention-4 and 32-bit indices: operands may exceed them, sums of a backward may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import Unsupported

TARGETS = [
    ma.Target.named(kind, (("fa4-jax", "0.1.0"),)) for kind in ("NVIDIA H200", "NVIDIA B200")
]


def _plan(batch: int, length: int, head_dim: int, target: ma.Target, **call: Any) -> ma.Plan:
    asked = ma.Call(batch, length, length, 8, 8, head_dim, "bfloat16", **call)
    return ma.plan(asked, ma.AttentionConfig(attention="flash"), None, target)


@pytest.mark.parametrize("target", TARGETS)
def test_operands_of_more_than_2_to_the_31_elements_run(target: ma.Target) -> None:
    """Strides have 64 bits; these operands have 2**33 elements."""
    assert _plan(8, 2**20, 128, target).kernel.name == "flash"
    assert _plan(1, 2**23, 128, target).kernel.name == "flash"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_sums_beyond_int32_are_refused(head_dim: int, target: ma.Target) -> None:
    if head_dim > 128 and not target.device.is_a("hopper"):
        pytest.skip("Blackwell GPUs take head dims up to 128")
    width = 192 if head_dim == 160 else head_dim
    most = (2**31 - 1) // width - 256
    assert _plan(2, most, head_dim, target).kernel.name == "flash"
    with pytest.raises(Unsupported, match="at most 2147483647 numbers"):
        _plan(2, most + 1, head_dim, target)


def test_under_lengths_batch_rows_share_the_axis() -> None:
    mask, most = M.KeyPadding(np.full(2, 5)).form(), (2**31 - 1) // 256 - 256
    assert _plan(2, most, 128, TARGETS[0], mask=mask).kernel.name == "flash"
    with pytest.raises(Unsupported, match="at most 2147483647 numbers"):
        _plan(2, most + 1, 128, TARGETS[0], mask=mask)
