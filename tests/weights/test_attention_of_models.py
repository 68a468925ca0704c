"""Our modules with the weights of diffusers' own attention of single models: the same outputs and
gradients, live, where torch and diffusers are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("diffusers") is None,
        reason="torch or diffusers is not installed",
    ),
]
B, T, S, N, H = 2, 10, 6, 4, 16
C = N * H
RNG = np.random.default_rng(31)
X, TEXT = (RNG.standard_normal((B, n, C)).astype(np.float32) for n in (T, S))
HEADS: dict[str, Any] = {"heads": N, "dim_head": H, "eps": 1e-6, "rngs": nnx.Rngs(0)}
DENSE = ma.AttentionConfig(attention="dot_product", cross_attention="dot_product")
LTX: dict[str, Any] = {"bias": True, "qk_norm": "rms_norm_across_heads", "config": DENSE} | HEADS


class Case(NamedTuple):
    """Hold one attention of a model.

    Args:
        theirs: makes diffusers' module.
        run: calls it with torch's (x, text).
        ours: makes our module.
        call: calls it with (module, x, text).
    """

    theirs: Callable[[], Any]
    run: Callable[[Any, Any, Any], Any]
    ours: Callable[[], Any]
    call: Callable[[Any, Any, Any], Any]


ANGLES = RNG.uniform(0, 6, (B, T, N, H // 2))
COS, SIN = (f(ANGLES).astype(np.float32) for f in (np.cos, np.sin))


def ltx2(rope_type: str, gated: bool) -> Case:
    """Turn heads apart: a table [B, N, T, H/2] ("split"), or one of all channels, each twice."""

    def theirs() -> Any:
        from diffusers.models.transformers.transformer_ltx2 import LTX2Attention

        return LTX2Attention(C, N, N, H, rope_type=rope_type, apply_gated_attention=gated)

    def tables() -> Any:
        import torch

        if rope_type == "split":
            return tuple(torch.tensor(a.swapaxes(1, 2).copy()) for a in (COS, SIN))
        return tuple(torch.tensor(np.repeat(a, 2, -1).reshape(B, T, C)) for a in (COS, SIN))

    style = "half" if rope_type == "split" else "interleaved"
    return Case(
        theirs,
        lambda m, x, _: m(x, query_rotary_emb=tables()),
        lambda: ma.FlaxAttention(C, gate="per_head" if gated else None, **LTX),
        lambda m, x, _: m(x, rotary_emb=ma.Rotary(COS, SIN, style)),
    )


def flux_single() -> Case:
    def theirs() -> Any:
        from diffusers.models.transformers.transformer_flux import FluxAttention

        return FluxAttention(C, dim_head=H, heads=N, out_dim=C, bias=True, eps=1e-6, pre_only=True)

    def run(m: Any, x: Any, _: Any) -> Any:
        import torch

        pair = tuple(torch.tensor(np.repeat(a[0, :, 0], 2, -1)) for a in (COS, SIN))
        return m(x, image_rotary_emb=pair)

    how = HEADS | {"qk_norm": "rms_norm", "bias": True, "config": DENSE}
    return Case(
        theirs,
        run,
        lambda: ma.FlaxAttention(C, out_proj=False, out_dim=C, **how),
        lambda m, x, _: m(x, rotary_emb=ma.Rotary(COS[0, :, 0], SIN[0, :, 0])),
    )


def sd3_last() -> Case:
    def theirs() -> Any:
        from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0

        return Attention(
            query_dim=C, cross_attention_dim=None, added_kv_proj_dim=C, dim_head=H, heads=N,
            out_dim=C, context_pre_only=True, bias=True, processor=JointAttnProcessor2_0(),
            qk_norm="rms_norm", eps=1e-6,
        )  # fmt: skip

    how = HEADS | {"qk_norm": "rms_norm", "bias": True, "config": DENSE}
    return Case(
        theirs,
        lambda m, x, text: m(hidden_states=x, encoder_hidden_states=text)[0],
        lambda: ma.JointAttention(C, C, text_out=False, **how),
        lambda m, x, text: m(x, text)[0],
    )


CASES = {
    "ltx2_split": ltx2("split", False),
    "ltx2_split_gated": ltx2("split", True),
    "ltx2_interleaved_gated": ltx2("interleaved", True),
    "flux_single": flux_single(),
    "sd3_last": sd3_last(),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_diffusers(name: str) -> None:
    import torch

    case = CASES[name]
    torch.manual_seed(0)
    theirs = case.theirs().float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, text = (torch.tensor(a, requires_grad=True) for a in (X, TEXT))
    out = case.run(theirs, x, text)
    dout = torch.randn_like(out)
    out.backward(dout)
    module = case.ours()
    weights = {key: value.detach().numpy() for key, value in theirs.state_dict().items()}
    assert ma.weights.load_diffusers(module, weights) == ma.weights.Loaded()

    def loss(m: nnx.Module, x: jax.Array) -> Any:
        y = case.call(m, x, jnp.asarray(TEXT))
        return jnp.sum(y * dout.numpy()), y

    grads, y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(module, jnp.asarray(X))
    _near("output", y, out.detach(), 2e-5)
    _near("gradient of x", grads[1], x.grad, 1e-4)
    nnx.update(module, grads[0])
    mine = ma.weights.to_diffusers(module)
    for key, parameter in theirs.named_parameters():
        _near(f"gradient of {key}", mine[key], parameter.grad, 1e-4)


def _near(what: str, got: Any, want: Any, limit: float) -> None:
    want = np.asarray(want)
    scale = max(float(np.max(np.abs(want))), 1e-3)
    error = float(np.max(np.abs(np.asarray(got) - want))) / scale
    print(f"{what}: {error:.1e}")
    assert error <= limit, (what, error)
