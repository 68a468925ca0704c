"""`tpu_few_keys`: forward and gradients against float64, with every kind of mask and head count."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import Unsupported
from tests.cases import allowed, both, compare, draw_operands
from tests.reference import attention64
from tests.waiting import but

CONFIG = ma.AttentionConfig(attention="tpu_few_keys", cross_attention="tpu_few_keys")


class Case(NamedTuple):
    """The sizes of a call, and how many keys each of the two batch rows has (None: all)."""

    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, int] | None = None
    flags: bool = False
    dtype: str = "float32"
    size: float = 1.0
    float32_qk_product: bool = False


CASES = {
    "whole": Case(256, 128, 2, 2, 64),
    "a text of 77": Case(300, 77, 4, 4, 64),
    "one key": Case(130, 1, 2, 2, 128),
    "lengths": Case(300, 77, 4, 4, 64, (77, 5)),
    "a row without keys": Case(140, 130, 2, 2, 64, (0, 130)),
    "flags": Case(140, 77, 2, 2, 64, (0, 30), flags=True),
    "shared key heads": Case(200, 77, 8, 2, 64, (77, 40)),
    "one key head": Case(200, 77, 6, 1, 40),
    "whole arrays of heads": Case(129, 100, 3, 3, 40),
    "1,024 keys": Case(128, 1024, 2, 2, 128),
    "bfloat16": Case(300, 77, 4, 4, 64, (77, 5), dtype="bfloat16"),
    "float16": Case(300, 77, 4, 4, 64, (77, 5), dtype="float16"),
    "large scores": Case(300, 77, 2, 2, 64, (77, 5), size=12.0),
    "large scores in float16": Case(200, 77, 2, 2, 64, dtype="float16", size=4.0),
    # K times the scale is not rounded then; rounded, it changes the output by 0.2.
    "float32 products": Case(140, 200, 2, 2, 128, None, False, "bfloat16", 6.0, True),
}
DIGITS = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
MANY = (
    "float32 products",
    "one key",
    "flags",
    "shared key heads",
    "large scores",
    "a row without keys",
    "bfloat16",
)


@pytest.mark.parametrize("name", but(CASES, MANY))
def test_forward_and_gradients(name: str) -> None:
    """The output, the LSE, and all gradients; a row without keys has no LSE."""
    case = CASES[name]
    rng, mask = np.random.default_rng(7), _mask(case)
    sizes = 2, case.q_len, case.kv_len, case.heads, case.kv_heads, case.head_dim
    x = draw_operands(*sizes)
    x |= {key: jnp.asarray(x[key] * case.size, case.dtype) for key in "qk"}
    x |= {key: jnp.asarray(x[key], case.dtype) for key in ("v", "dout")}
    ok = np.asarray(allowed(mask, case.q_len, case.kv_len))
    x["dlse"] = rng.normal(size=x["dlse"].shape).astype(np.float32) * ok.any(-1)
    config = CONFIG.replace(float32_qk_product=case.float32_qk_product)
    attend = partial(ma.attention, mask=mask, config=config, role="cross", return_lse=True)
    got = jax.jit(partial(both, attend, x))(x["q"], x["k"], x["v"])
    want = attention64(x["q"], x["k"], x["v"], ok, dout=x["dout"], dlse=x["dlse"])
    large = case.size**2 if not case.float32_qk_product else 1.0  # scores are rounded
    compare(got, want, DIGITS[case.dtype] * large)
    assert all(g.dtype == x[key].dtype for g, key in zip(got[2:], "qkv", strict=True))


def test_float32_products_with_a_step_too_large_are_refused() -> None:
    config = ma.AttentionConfig(attention="tpu_few_keys", float32_qk_product=True)
    call = ma.Call(1, 4096, 1024, 4, 1, 128, "bfloat16")
    for settings, refused in ((config, True), (CONFIG, False)):
        with pytest.raises(Unsupported) if refused else nullcontext():
            ma.plan(call, settings, target=ma.Target.named("TPU v6e"))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_stays_in_its_row(bad: float) -> None:
    x = draw_operands(2, 300, 77, 4, 4, 64)
    x["q"][0, 5, 1, 3] = bad
    out = ma.attention(x["q"], x["k"], x["v"], config=CONFIG, role="cross")
    rows = np.argwhere(np.isnan(np.asarray(out)).any(axis=3))
    assert rows.tolist() == [[0, 5, 1]]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (ma.Call(1, 128, 1025, 2, 2, 64, "bfloat16"), "at most 1,024 keys"),
        (ma.Call(1, 128, 128, 2, 2, 64, "bfloat16", M.Causal()), "depend on keys alone"),
        (ma.Call(1, 128, 512, 128, 1, 64, "bfloat16"), "128 query and 1 key heads"),
        (ma.Call(1, 128, 128, 2, 2, 64, "float16"), "float16"),
    ],
)
def test_refused(call: ma.Call, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        ma.plan(call, CONFIG, target=ma.Target.named("TPU v6e"))


def _mask(case: Case) -> M.Mask:
    if case.lengths is None:
        return M.Full()
    lengths = np.asarray(case.lengths, np.int32)
    if not case.flags:
        return M.KeyPadding(lengths)
    real = np.arange(case.kv_len) < lengths[:, None]
    return M.KeyPadding(np.random.default_rng(3).permuted(real, axis=1))
