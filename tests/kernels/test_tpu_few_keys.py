"""`tpu_few_keys`: forward and gradients against float64, with every kind of mask and head count."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import Unsupported
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
}
MANY = ("one key", "flags", "shared key heads", "large scores", "a row without keys", "bfloat16")


@pytest.mark.parametrize("name", but(CASES, MANY))
def test_forward_and_gradients(name: str) -> None:
    case = CASES[name]
    q, k, v, dout = _arrays(case)
    mask, allowed = _mask(case)

    @jax.jit
    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        attend = partial(ma.attention, mask=mask, config=CONFIG, role="cross")
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    want = attention64(q, k, v, allowed, dout=dout)
    digits = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}[case.dtype]
    exact = want.out, want.dq, want.dk, want.dv
    for got, one in zip(run(q, k, v, dout), exact, strict=True):
        error = np.abs(np.asarray(got, np.float64) - one).max()
        assert error < digits * max(1.0, case.size**2 * np.abs(one).max())


def test_float32_products_of_large_scores_in_bfloat16() -> None:
    """K times the scale must not be rounded; rounding changes the output by 0.2."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        jnp.asarray(rng.normal(size=(1, n, 2, 128)) * size, jnp.bfloat16)
        for n, size in ((140, 6.0), (200, 6.0), (200, 1.0), (140, 1.0))
    )
    config = ma.AttentionConfig(attention="tpu_few_keys", float32_qk_product=True)
    out, pull = jax.vjp(partial(ma.attention, config=config), q, k, v)
    want = attention64(q, k, v, dout=dout)
    exact = want.out, want.dq, want.dk, want.dv
    for got, one, given in zip((out, *pull(dout)), exact, (q, q, k, v), strict=True):
        assert got.dtype == given.dtype
        assert np.abs(np.asarray(got, np.float64) - one).max() < 1e-2 * np.abs(one).max()


def test_float32_products_with_a_step_too_large_are_refused() -> None:
    config = ma.AttentionConfig(attention="tpu_few_keys", float32_qk_product=True)
    call = ma.Call(1, 4096, 1024, 4, 1, 128, "bfloat16")
    for settings, refused in ((config, True), (CONFIG, False)):
        with pytest.raises(Unsupported) if refused else nullcontext():
            ma.plan(call, settings, target=ma.Target.named("TPU v6e"))


def test_lse_and_its_gradient() -> None:
    case = CASES["lengths"]
    q, k, v, _ = _arrays(case)
    mask, allowed = _mask(case)

    def loss(q: Any, k: Any) -> Any:
        _, lse = ma.attention(q, k, v, mask=mask, config=CONFIG, role="cross", return_lse=True)
        return jnp.sum(lse**2)

    def exact(q: Any, k: Any) -> Any:
        s = jnp.einsum("btnh,bsnh->bnts", q, k) * case.head_dim**-0.5
        return jnp.sum(jax.nn.logsumexp(jnp.where(allowed, s, -jnp.inf), axis=3) ** 2)

    for got, want in zip(*(jax.grad(f, (0, 1))(q, k) for f in (loss, exact)), strict=True):
        assert np.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_stays_in_its_row(bad: float) -> None:
    q, k, v, _ = _arrays(CASES["a text of 77"])
    out = ma.attention(q.at[0, 5, 1, 3].set(bad), k, v, config=CONFIG, role="cross")
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


def _arrays(case: Case) -> tuple[Any, ...]:
    rng = np.random.default_rng(7)
    queries, keys = (
        (2, n, heads, case.head_dim)
        for n, heads in ((case.q_len, case.heads), (case.kv_len, case.kv_heads))
    )
    sizes = case.size, case.size, 1.0, 1.0
    shapes = zip((queries, keys, keys, queries), sizes, strict=True)
    return tuple(jnp.asarray(size * rng.normal(size=s), case.dtype) for s, size in shapes)


def _mask(case: Case) -> tuple[Any, Any]:
    if case.lengths is None:
        return None, None
    lengths = np.asarray(case.lengths, np.int32)
    real = np.arange(case.kv_len) < lengths[:, None]
    if case.flags:
        real = np.random.default_rng(3).permuted(real, axis=1)
        return M.KeyPadding(real), real[:, None, None]
    return M.KeyPadding(lengths), real[:, None, None]
