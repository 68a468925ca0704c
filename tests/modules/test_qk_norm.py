"""Norms of queries and keys against numpy float64; in modules: test_self_attention.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn.modules.qk_norm import QK_NORMS, QKNorm, make_qk_norm, normalise

RNG = np.random.default_rng(1)
N, H, EPS = 3, 10, 1e-6


def param(norm: QKNorm, name: str) -> nnx.Param[jax.Array]:
    """Return a parameter of the norm; flax types each as optional."""
    return getattr(norm, name)


def made(kind: str) -> QKNorm:
    norm = make_qk_norm(kind, N, H, EPS, rngs=nnx.Rngs(0))
    assert norm is not None
    for name in ("scale", "bias") if kind == "layer_norm" else ("scale",):
        noise = RNG.standard_normal(norm.num_features)
        param(norm, name).set_value(jnp.asarray(1 + noise, jnp.float32))
    return norm


def expected(kind: str, norm: QKNorm, x: np.ndarray) -> np.ndarray:
    x, scale = (np.asarray(a, np.float64) for a in (x, param(norm, "scale").get_value()))
    if kind == "layer_norm":
        bias = np.float64(param(norm, "bias").get_value())
        z = x - x.mean(-1, keepdims=True)
        return z / np.sqrt(x.var(-1, keepdims=True) + EPS) * scale + bias
    factor = 1 + scale if kind == "zero_centred_rms_norm" else scale
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * factor


def inputs(kind: str, size: float = 1.0, mean: float = 0.0) -> np.ndarray:
    shape = (2, 5, N * H) if kind == "rms_norm_across_heads" else (2, 5, N, H)
    return (mean + size * RNG.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("kind", QK_NORMS)
def test_low_precision_is_normed_in_float32(kind: str) -> None:
    for dtype in (jnp.bfloat16, jnp.float16):  # 300^2 overflows float16
        norm, x = made(kind), jnp.asarray(inputs(kind, size=300.0)).astype(dtype)
        y, want = normalise(norm, x), expected(kind, norm, np.float64(x))
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6)
    assert np.isfinite(normalise(norm, jnp.zeros(x.shape))).all()


def test_layer_norm_survives_a_mean_far_from_zero() -> None:
    norm, x = made("layer_norm"), inputs("layer_norm", mean=1000.0)
    want = expected("layer_norm", norm, x)
    np.testing.assert_allclose(normalise(norm, jnp.asarray(x)), want, atol=2e-3)


def test_widths_and_mesh_axes_of_the_parameters() -> None:
    for kind, name, width, axis in (
        ("rms_norm_across_heads", "scale", N * H, "tensor"),
        ("rms_norm", "scale", H, None),
        ("zero_centred_rms_norm", "scale", H, None),
        ("layer_norm", "bias", H, None),
    ):
        found = param(made(kind), name)
        assert found.get_value().shape == (width,)
        assert found.get_metadata()["out_sharding"] == (axis,)


def test_a_zero_centred_norm_begins_at_one_and_no_norm_changes_nothing() -> None:
    x = jnp.asarray(inputs("rms_norm"))
    fresh = [make_qk_norm(kind, N, H, EPS, rngs=nnx.Rngs(0)) for kind in (*QK_NORMS, None)]
    rms, _, zero_centred, _, none = fresh
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_array_equal(normalise(zero_centred, x), normalise(rms, x))
    assert none is None and normalise(None, x) is x
