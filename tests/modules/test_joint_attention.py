"""`JointAttention`: both sequences as one, no output for the text, no output projections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.modules import JointAttention
from tests.modules.reference import attend, compiled, linear, norm, params_of, randomise, turn

RNG = np.random.default_rng(21)
B, T, S, C, N, H = 2, 12, 8, 24, 4, 8
X, TEXT = (RNG.standard_normal((B, n, C)).astype(np.float32) for n in (T, S))
ANGLES = RNG.uniform(0, 6, (B, S + T, N, H // 2))
OF_BOTH = ma.Rotary(*(f(ANGLES).astype(np.float32) for f in (np.cos, np.sin)), "half")
CONFIG = ma.AttentionConfig(attention="dot_product")


def built(**how: Any) -> JointAttention:
    how = {"heads": N, "dim_head": H, "config": CONFIG, "rngs": nnx.Rngs(0)} | how
    return randomise(JointAttention(C, **how))


def test_output() -> None:
    """The text comes first, also in angles; each sequence has its own projections and norms."""
    module = built(qk_norm="rms_norm", kv_heads=2, bias=True)
    p, sources = params_of(module), (np.float64(TEXT), np.float64(X))

    def heads(names: tuple[str, str], norms: tuple[str, str], n: int) -> Any:
        each = zip(names, norms, sources, strict=True)
        parts = [norm(module, p.get(of), linear(p[name], x), n) for name, of, x in each]
        return np.concatenate(parts, axis=1)

    q = heads(("add_q_proj", "to_q"), ("norm_added_q", "norm_q"), N)
    k = heads(("add_k_proj", "to_k"), ("norm_added_k", "norm_k"), 2)
    v = heads(("add_v_proj", "to_v"), ("", ""), 2)
    turns = ma.Rotary(OF_BOTH.cos[:, :, :1], OF_BOTH.sin[:, :, :1], "half")
    out = attend(turn(q, turns), turn(k, turns), v).reshape(B, S + T, -1)
    picture, text = compiled(module, X, TEXT, turns)
    np.testing.assert_allclose(text, linear(p["to_add_out"], out[:, :S]), atol=1e-5)
    np.testing.assert_allclose(picture, linear(p["to_out"], out[:, S:]), atol=1e-5)


def test_both_outputs_have_the_modules_dtype() -> None:
    outputs = compiled(built(dtype="bfloat16", bias=True), X, TEXT)
    assert [y.dtype.name for y in outputs] == ["bfloat16"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"text_out": False}, {"out_proj": False}, {}], ids=["no_text", "heads_joined", "both"]
)
def test_outputs_that_are_left_out(how: dict[str, Any]) -> None:
    """Without the text's output, or without both projections; the caller may add their biases."""
    whole, module = built(), built(**how)
    shared = {k: v for k, v in nnx.to_pure_dict(nnx.state(whole)).items() if hasattr(module, k)}
    nnx.update(module, shared)
    (picture, text), (want, want_text) = (m(X, TEXT, OF_BOTH) for m in (module, whole))
    if "text_out" in how:
        assert text is None and not hasattr(module, "to_add_out")
        np.testing.assert_allclose(picture, want, atol=1e-6)
    elif "out_proj" in how:
        assert picture.shape == (B, T, N * H) and text.shape == (B, S, N * H)
        np.testing.assert_allclose(whole.to_out(picture), want, atol=1e-5)
        np.testing.assert_allclose(whole.to_add_out(text), want_text, atol=1e-5)
    apart = module.without_out_bias(X, TEXT, OF_BOTH)
    for found, one in zip(apart, (picture, text), strict=True):
        assert (found is None) == (one is None)
        if found is not None:
            y, bias = found
            assert (bias is None) == ("out_proj" in how)
            np.testing.assert_allclose(y if bias is None else y + bias, one, atol=2e-5)
