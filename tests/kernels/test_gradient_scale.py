"""float16 gradients at both ends of float16's range, if the scores' gradients exceed it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from tests.cases import RESULTS, TOLERANCE, both
from tests.kernels.test_surroundings import SETTINGS as ALIKE
from tests.kernels.test_surroundings import needs_tokamax
from tests.reference import attention64, error

CHUNKS = {"query_chunk_size": 2, "key_chunk_size": 3}
SETTINGS = ALIKE | {
    "blockwise": ALIKE["blockwise"] | CHUNKS,
    "tpu_flash": {"attention": "tpu_flash"},
}
EACH = [
    *("dense", "blockwise", "tpu_flash"),
    pytest.param("flash", marks=pytest.mark.slow),
    pytest.param("flash fused", marks=pytest.mark.slow),
    pytest.param("tokamax_flash", marks=[needs_tokamax, pytest.mark.slow]),
]


def operands(size: float, bias: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Draw float16 operands with cotangents of a given size.

    At 10,000, dS exceeds 65,504. At 1e-6, dS is a few multiples of 2**-24, and dQ is 20 times as
    large.
    """
    rng, b, t, n, k, h = np.random.default_rng(0), 2, 4, 4, 2, 32
    x = {"q": (b, t, n, h), "k": (b, t, k, h), "v": (b, t, k, h), "dout": (b, t, n, h)}
    factors = {"q": 0.02, "k": 0.02, "v": 8.0} if size > 1 else {"q": 0.02, "k": 50.0, "v": 1.0}
    factors["dout"] = size
    found = {
        name: (factors[name] * rng.normal(size=shape).clip(-2, 2)).astype(np.float16)
        for name, shape in x.items()
    }
    found["bias"] = None if bias is None else rng.normal(size=bias).astype(np.float32)
    return found | {"dlse": (size * rng.normal(size=(b, n, t))).astype(np.float32)}


def judge(x: dict[str, Any], settings: dict[str, Any], mask: Any = None, **more: Any) -> None:
    ok = None if mask is None else np.asarray(mask.bind(4, 4).allowed(np.arange(4), np.arange(4)))
    given = x["q"], x["k"], x["v"], x["bias"]
    scale = more.get("scale")
    want = attention64(*given[:3], ok, x["bias"], scale, dout=x["dout"], dlse=x["dlse"])
    config = ma.AttentionConfig(**settings)
    attend = partial(ma.attention, config=config, mask=mask, return_lse=True, **more)
    call = partial(both, lambda q, k, v, bias: attend(q, k, v, bias=bias), x)
    check(jax.jit(call)(*given), want)


def check(got: Any, want: Any) -> None:
    """Compare gradients within float16's own rounding, at least 2**-25."""
    for name, g, w in list(zip(RESULTS, got, want, strict=False))[2:]:
        if w is not None:
            assert np.abs(w).max() < 65_504 or g.dtype == jnp.float32, "the true gradient fits"
            off = np.abs(np.asarray(g, np.float64) - w).max()
            assert off <= TOLERANCE["float16"] * np.abs(w).max() + 2**-24, (name, off, w.max())


@pytest.mark.parametrize("size", [10_000.0, 1e-6])
@pytest.mark.parametrize("name", EACH)
def test_gradients_are_right_at_both_ends_of_the_range(name: str, size: float) -> None:
    judge(operands(size), SETTINGS[name], M.Causal())


@pytest.mark.parametrize(("name", "large"), [("dense", "v"), ("blockwise", "dout")])
def test_gradients_of_values_keep_their_digits_beside_large_operands(name: str, large: str) -> None:
    """Products of q and dS might overflow, and a product of v and dout is nearly 0."""
    x = operands(1.0)
    for key, size in {"q": 2e4, "k": 2e-6, "v": 1e-4, "dout": 1e-4, large: 2e4}.items():
        exact = x[key].astype(np.float64)
        x[key] = (exact / np.abs(exact).max() * size).astype(np.float16)
    judge(x, SETTINGS[name], scale=1e-3)


@pytest.mark.parametrize("name", ["dense", "flash", "tpu_flash", "few keys"])
def test_queries_and_keys_near_zero_keep_their_digits(name: str) -> None:
    """Multiplied by the scale, q would be zero in float16, but its gradients are not."""
    x = operands(1.0)
    x |= {key: (x[key] / np.abs(x[key]).max() * 1e-6).astype(np.float16) for key in "qk"}
    x |= {key: x[key] * np.float16(500) for key in ("v", "dout")}
    settings = SETTINGS.get(name, {"attention": "tpu_few_keys"})
    judge(x, settings, M.KeyPadding(jnp.array([3, 4])), scale=0.01)


@pytest.mark.parametrize(
    ("shape", "size"), [((2, 4, 4, 4), 1e-6), ((1, 4, 1, 4), 10_000.0), ((2, 1, 4, 1), 1e-6)]
)
def test_the_gradient_of_a_bias(shape: tuple[int, ...], size: float) -> None:
    judge(operands(size, shape), SETTINGS["dense"])


@pytest.mark.parametrize("strategy", ["none", "all_gather", "ring", "ulysses"])
def test_over_devices_that_share_a_batch_row(strategy: str) -> None:
    """Devices whose tokens have other magnitudes use one scale, because dK and dV are summed."""
    x = operands(10_000.0)
    x["dout"][:, :2] *= np.float16(2**-9)
    sizes = {"ici_data_parallelism": 2, "ici_context_parallelism": 2}
    mesh = ma.AttentionConfig(**sizes).make_mesh(jax.devices()[:4])
    judge(x, SETTINGS["dense"] | {"context_parallel": strategy}, mesh=mesh)


def test_a_batch_row_that_is_not_finite_leaves_the_others_alone() -> None:
    x, config = operands(10_000.0), ma.AttentionConfig(**SETTINGS["dense"])
    want = attention64(x["q"], x["k"], x["v"], dout=x["dout"], dlse=x["dlse"])
    x["dout"][1, 0, 0, 0] = np.inf
    attend = partial(ma.attention, config=config, return_lse=True)
    got = both(attend, x, x["q"], x["k"], x["v"])
    check([y[:1] for y in got], [None if y is None else y[:1] for y in want])
    assert all(not np.isfinite(np.asarray(y[1])).all() for y in got[2:])


def test_second_derivatives_equal_those_of_float32() -> None:
    rng = np.random.default_rng(1)
    x = [rng.normal(size=(2, 4, n, 32)).astype(np.float16) for n in (4, 2, 2)]

    def penalty(*x: Any) -> Any:
        attend = partial(ma.attention, config=ma.AttentionConfig(**SETTINGS["dense"]))
        loss = jax.grad(lambda *y: (attend(*y).astype(jnp.float32) ** 2).sum(), (0, 1, 2))
        return sum((y.astype(jnp.float32) ** 2).sum() for y in loss(*x))

    run = jax.jit(jax.grad(penalty, (0, 1, 2)))
    for g, w in zip(run(*x), run(*(y.astype(np.float32) for y in x)), strict=True):
        assert error(g, w) < 5e-3


@pytest.mark.parametrize(("name", "size"), [("dense", 30_000.0), ("blockwise", 1e-6)])
def test_forward_mode(name: str, size: float) -> None:
    """With tangents of 30,000 the scores' tangents exceed 65,504, but the output's do not."""
    x = operands(1e-6)
    primals = [x["q"], (x["k"] / 5).astype(np.float16), (x["v"] / 40).astype(np.float16)]
    dq = (size * np.sign(x["q"])).astype(np.float16)
    attend = partial(ma.attention, config=ma.AttentionConfig(**SETTINGS[name]), return_lse=False)

    def tangent(dtype: Any) -> Any:
        q, k, v = (y.astype(dtype) for y in primals)
        return jax.jvp(lambda q: attend(q, k, v), (q,), (dq.astype(dtype),))[1]

    want = np.asarray(tangent(np.float32))
    assert np.abs(want).max() < 65_504
    off = np.abs(np.asarray(tangent(np.float16), np.float32) - want).max()
    assert off <= TOLERANCE["float16"] * np.abs(want).max() + 2**-24


def test_without_promotion_and_in_64_bit_mode() -> None:
    forbidden = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with forbidden[0], forbidden[1], jax.enable_x64(True):
        judge(operands(10_000.0), SETTINGS["dense"])


def test_the_plan_names_the_maximum_over_devices() -> None:
    x, mesh = operands(1.0), {"data": 2, "context": 2}
    q, k = x["q"], x["k"]
    for dtype, named in (("float16", 1), ("bfloat16", 0)):
        call = ma.Call.of(q.astype(dtype), k.astype(dtype))
        kinds = [c.kind for c in ma.plan(call, ma.AttentionConfig(), mesh).collectives]
        assert kinds.count("pmax") == named
