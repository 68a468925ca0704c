"""Norms of queries and keys against numpy float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn.errors import InputError
from maxattn.modules.qk_norm import QK_NORMS, QKNorm, make_qk_norm, normalise

RNG = np.random.default_rng(1)
N, H = 3, 10


def param(norm: QKNorm, name: str) -> nnx.Param[jax.Array]:
    """Return a parameter that the norm has; flax types each as one that may be absent."""
    return getattr(norm, name)


def made(kind: str, eps: float = 1e-6) -> QKNorm:
    norm = make_qk_norm(kind, N, H, eps, rngs=nnx.Rngs(0))
    assert norm is not None
    width = norm.num_features
    param(norm, "scale").set_value(jnp.asarray(1 + RNG.standard_normal(width), jnp.float32))
    if kind == "layer_norm":
        param(norm, "bias").set_value(jnp.asarray(RNG.standard_normal(width), jnp.float32))
    return norm


def expected(kind: str, norm: QKNorm, x: np.ndarray, eps: float) -> np.ndarray:
    x = np.asarray(x, np.float64)
    scale = np.asarray(param(norm, "scale").get_value(), np.float64)
    if kind == "layer_norm":
        bias = np.asarray(param(norm, "bias").get_value(), np.float64)
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(
            x.var(-1, keepdims=True) + eps
        ) * scale + bias
    factor = 1 + scale if kind == "zero_centred_rms_norm" else scale
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * factor


def inputs(kind: str, size: float = 1.0, mean: float = 0.0) -> np.ndarray:
    shape = (2, 5, N * H) if kind == "rms_norm_across_heads" else (2, 5, N, H)
    return (mean + size * RNG.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
@pytest.mark.parametrize("kind", QK_NORMS)
def test_each_norm_is_its_formula_and_honours_eps(kind: str, eps: float) -> None:
    norm, x = made(kind, eps), inputs(kind)
    np.testing.assert_allclose(
        normalise(norm, jnp.asarray(x)), expected(kind, norm, x, eps), atol=2e-6, rtol=2e-6
    )


@pytest.mark.parametrize("kind", QK_NORMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_normed_in_float32(kind: str, dtype: jnp.dtype) -> None:
    # 300^2 overflows float16.
    norm, x = made(kind), jnp.asarray(inputs(kind, size=300.0)).astype(dtype)
    y = normalise(norm, x)
    want = expected(kind, norm, np.asarray(x, np.float64), 1e-6)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6)


def test_layer_norm_survives_a_mean_far_from_zero() -> None:
    norm, x = made("layer_norm"), inputs("layer_norm", mean=1000.0)
    np.testing.assert_allclose(
        normalise(norm, jnp.asarray(x)), expected("layer_norm", norm, x, 1e-6), atol=2e-3
    )


@pytest.mark.parametrize("kind", QK_NORMS)
def test_a_row_of_zeros_stays_finite(kind: str) -> None:
    norm = made(kind)
    assert np.isfinite(normalise(norm, jnp.zeros(inputs(kind).shape))).all()


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


def test_a_zero_centred_norm_begins_at_one() -> None:
    norm = make_qk_norm("zero_centred_rms_norm", N, H, 1e-6, rngs=nnx.Rngs(0))
    plain = make_qk_norm("rms_norm", N, H, 1e-6, rngs=nnx.Rngs(0))
    x = jnp.asarray(inputs("rms_norm"))
    np.testing.assert_array_equal(normalise(norm, x), normalise(plain, x))


def test_no_norm_changes_nothing() -> None:
    x = jnp.ones((1, 2, 3))
    assert make_qk_norm(None, N, H, 1e-6, rngs=nnx.Rngs(0)) is None
    assert normalise(None, x) is x


@pytest.mark.parametrize(
    ("kind", "remedy"), [("rmsnorm", "did you mean 'rms_norm'?"), ("batch", "use None for no norm")]
)
def test_an_unknown_norm_is_refused(kind: str, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        make_qk_norm(kind, N, H, 1e-6, rngs=nnx.Rngs(0))
    assert caught.value.setting == "qk_norm" and caught.value.remedy == remedy
