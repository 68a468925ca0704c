"""Values with another head dim than keys, in libraries whose kernels have a single head dim."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import pytest

import maxattn as ma
from tests.cases import compare
from tests.gpu.requirements import skip_unless_available
from tests.kernels import test_value_head_dim as values

pytestmark = pytest.mark.gpu

KERNELS = ("flash", "cudnn", "cudnn_flash_te", "tokamax_flash")


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_against_float64(kernel: str, dims: tuple[int, int], mask: str) -> None:
    skip_unless_available(kernel)
    case: dict[str, Any] = {"mask": mask, "dims": dims, "length": "64", "heads": "mha"}
    case |= {"dtype": "bfloat16", "bias": "none"}
    x, config = values.arrays(case), ma.AttentionConfig(attention=kernel)
    attend = partial(ma.attention, mask=x["mask"], config=config)
    qkv = x["q"], x["k"], x["v"]
    out, pull = jax.vjp(jax.jit(attend), *qkv)
    want = values.attention64(*qkv, x["ok"], x["bias"], dout=x["dout"])
    compare((out, None, *pull(x["dout"])), want, values.TOLERANCE["bfloat16"])
