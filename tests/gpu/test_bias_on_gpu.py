"""An additive bias on an NVIDIA GPU (`make test-gpu`): results against float64, or a refusal."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import Unsupported
from tests.cases import MASKS, TOLERANCE, run_case
from tests.gpu.far_bias import drawn
from tests.gpu.far_bias import judge as judge_far
from tests.gpu.requirements import skip_unless_available
from tests.gpu.test_matrix import judge_or_refuse
from tests.pairwise import name_of, pairwise
from tests.reference import error

pytestmark = pytest.mark.gpu

KERNELS = ["cudnn", "cudnn_flash_te", "flash"]
AXES = {
    "kernel": KERNELS,
    "bias": ["BNTS", "1NTS", "B1TS", "11TS", "keys", "BN1S", "11T1"],
    "mask": list(MASKS),
    "dtype": ["bfloat16", "float16"],
    "bias_dtype": ["that of q", "float32"],
    "heads": ["mha", "gqa", "mqa"],
    "length": ["64", "odd", "one", "cross", "short"],
    "head_dim": [40, 64, 72, 128],
    "batch": [1, 3],
}


@pytest.mark.parametrize(
    "case", pairwise(AXES, lambda case: True, core=("kernel", "bias", "bias_dtype")), ids=name_of
)
def test_pairs(case: dict, record_property: Any) -> None:
    skip_unless_available(case["kernel"])
    if case["bias_dtype"] == "that of q":
        judge_or_refuse(case | {"bias_dtype": case["dtype"]}, record_property)
    elif case["kernel"] == "flash":
        judge_or_refuse(case, record_property)
    else:
        with pytest.raises(Unsupported, match="have the dtype of q"):
            run_case(case, ma.AttentionConfig(attention=case["kernel"]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bias_of_another_head_dim_is_refused(kernel: str) -> None:
    skip_unless_available(kernel)
    q = jnp.ones((1, 64, 2, 192), "bfloat16")
    with pytest.raises(Unsupported, match="head dims up to 128"):
        attend(kernel)(q, q, q, bias=jnp.zeros((1, 1, 64, 64), "bfloat16"))


def attend(kernel: str) -> Any:
    return partial(ma.attention, config=ma.AttentionConfig(attention=kernel))


LEVELS = [0.0, 500.0, 1e4, -1e9, -1e12]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("differentiated", [True, False])
def test_rows_far_from_0(kernel: str, level: float, differentiated: bool) -> None:
    """Query rows whose bias is far from 0 in whole or in part, -inf, or the least bfloat16."""
    skip_unless_available(kernel)
    *x, bias = drawn(200, 328, 64, "bfloat16")
    bias = bias.at[:, :, :9].add(level).at[:, :, 9:20, :150].add(level).at[:, :, 20].set(-jnp.inf)
    least = jnp.finfo(jnp.bfloat16).min
    bias = bias.at[:, :, 21:40, 20:].set(-jnp.inf).at[:, :, 40:60, 130:].set(least)
    (q, k, v, dout), f = x, attend(kernel)
    if differentiated:
        out, pull = jax.vjp(lambda *x: f(*x[:3], bias=x[3]), q, k, v, bias)
    else:
        out, pull = jax.vjp(lambda *x: f(*x, bias=bias), q, k, v)
    judge_far((out, *pull(dout)), (*x, bias), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=["both", "queries", "bias"])
def test_mapped(kernel: str, axes: tuple[int | None, int | None]) -> None:
    skip_unless_available(kernel)
    rng = np.random.default_rng(6)
    q, k, dout = (jnp.asarray(rng.normal(size=(3, 2, 96, 4, 64)), "bfloat16") for _ in range(3))
    bias = jnp.asarray(rng.normal(size=(3, 1, 4, 96, 96)), "bfloat16")
    given = (x if axis == 0 else x[0] for x, axis in zip((q, bias), axes, strict=True))

    def both(q: Any, bias: Any, dout: Any) -> Any:
        f = partial(attend(kernel), k=k[0], v=k[1], mask=M.Causal())
        out, pull = jax.vjp(lambda q, bias: f(q, bias=bias), q, bias)
        return out, *pull(dout)

    got = jax.jit(jax.vmap(both, (*axes, 0)))(*given, dout)
    for i in range(3):
        at = (x[i if axis == 0 else 0] for x, axis in zip((q, bias), axes, strict=True))
        for mine, alone in zip(got, both(*at, dout[i]), strict=True):
            assert error(mine[i], alone) < 2e-2
