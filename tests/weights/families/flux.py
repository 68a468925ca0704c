"""Flux.1, Flux.2, Flux.3 and Chroma."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

import maxattn as ma
from maxattn.rope import rope_nd
from tests.weights.families.case import HOW, Attention, B, C, H, N, S
from tests.weights.families.positions import grid, still

ROWS, COLUMNS, MLP = 2, 3, 8
T = ROWS * COLUMNS
AXES_1, AXES_2 = (2, 2, 4), (2, 2, 2, 2)
RMS: dict[str, Any] = HOW | {"qk_norm": "rms_norm", "eps": 1e-6}
X, TEXT, BOTH = {"x": (B, T, C)}, {"text": (B, S, C)}, {"x": (B, S + T, C)}
POSITIONS = np.concatenate((still(S), grid(1, ROWS, COLUMNS)))
POSITIONS_2 = np.concatenate((grid(1, 1, 1, S), grid(1, ROWS, COLUMNS, 1)))
PAIRS = np.outer(*2 * [np.arange(S + T) != 2]).astype(np.float32)[None, None]
"""Chroma's pipeline gives flags of tokens that count in the dtype of the model; attention adds the
product of two tokens' flags to their score."""


def rope_1() -> Any:
    import torch
    from diffusers.models.transformers.transformer_flux import FluxPosEmbed

    return FluxPosEmbed(10000, list(AXES_1))(torch.tensor(POSITIONS))


def rope_2() -> Any:
    import torch
    from diffusers.models.transformers.transformer_flux2 import Flux2PosEmbed

    return Flux2PosEmbed(2000, list(AXES_2))(torch.tensor(POSITIONS_2))


def flux_1(**how: Any) -> Any:
    from diffusers.models.transformers.transformer_flux import FluxAttention

    return FluxAttention(C, heads=N, dim_head=H, out_dim=C, bias=True, eps=1e-6, **how)


def pairs() -> Any:
    import torch

    return torch.tensor(PAIRS)


def double(made: Any, rope: Any, mask: Any = lambda: None, **how: Any) -> dict[str, Any]:
    return {
        "made": made,
        "run": lambda m, i: m(i["x"], i["text"], mask(), image_rotary_emb=rope()),
        "ours": lambda rngs: ma.JointAttention(C, C, **RMS, **how, rngs=rngs),
        "inputs": X | TEXT,
    }


def flux_2() -> Any:
    from diffusers.models.transformers.transformer_flux2 import Flux2Attention

    how: dict[str, Any] = {"added_kv_proj_dim": C, "added_proj_bias": False, "out_bias": False}
    return Flux2Attention(C, heads=N, dim_head=H, out_dim=C, bias=False, eps=1e-6, **how)


class ParallelAttention(nnx.Module):
    """Run a single block's attention and feed-forward layer between two shared projections."""

    diffusers_names: ClassVar[dict[str, str]] = {"attn.norm_q": "norm_q", "attn.norm_k": "norm_k"}
    diffusers_fused: ClassVar[dict[str, tuple[str, ...]]] = {
        "to_qkv_mlp_proj": ("attn.to_q", "attn.to_k", "attn.to_v", "mlp")
    }

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attn = ma.FlaxAttention(C, out_proj=False, **RMS, rngs=rngs)
        self.mlp = nnx.Linear(C, 2 * MLP, use_bias=False, rngs=rngs)
        self.to_out = nnx.Linear(C + MLP, C, use_bias=False, rngs=rngs)

    def __call__(self, x: Any, rotary: ma.Rotary) -> Any:
        gate, up = jnp.split(self.mlp(x), 2, axis=-1)
        heads = self.attn(x, rotary_emb=rotary)
        return self.to_out(jnp.concatenate((heads, nnx.silu(gate) * up), -1))


def flux_2_single() -> Any:
    from diffusers.models.transformers.transformer_flux2 import Flux2ParallelSelfAttention

    how: dict[str, Any] = {"out_bias": False, "eps": 1e-6, "mlp_ratio": MLP / C}
    return Flux2ParallelSelfAttention(C, heads=N, dim_head=H, out_dim=C, **how)


def flux_3() -> Any:
    from diffusers.models.transformers.transformer_flux3 import Flux3Attention

    return Flux3Attention(C, heads=N, dim_head=H)


TABLE_1 = rope_nd(AXES_1, POSITIONS)
TABLE_2 = rope_nd(AXES_2, POSITIONS_2, theta=2000)

ATTENTIONS = {
    "flux1_double": Attention(
        **double(lambda: flux_1(added_kv_proj_dim=C), rope_1, bias=True),
        call=lambda m, i: m(i["x"], i["text"], rotary_emb=TABLE_1),
    ),
    "flux1_single": Attention(
        lambda: flux_1(pre_only=True),
        lambda m, i: m(i["x"], image_rotary_emb=rope_1()),
        lambda rngs: ma.FlaxAttention(C, bias=True, out_proj=False, **RMS, rngs=rngs),
        lambda m, i: m(i["x"], rotary_emb=TABLE_1),
        BOTH,
    ),
    "chroma_double": Attention(
        **double(lambda: flux_1(added_kv_proj_dim=C), rope_1, pairs, bias=True),
        call=lambda m, i: m(i["x"], i["text"], TABLE_1, bias=jnp.asarray(PAIRS)),
    ),
    "chroma_single": Attention(
        lambda: flux_1(pre_only=True),
        lambda m, i: m(i["x"], attention_mask=pairs(), image_rotary_emb=rope_1()),
        lambda rngs: ma.FlaxAttention(C, bias=True, out_proj=False, **RMS, rngs=rngs),
        lambda m, i: m(i["x"], TABLE_1, bias=jnp.asarray(PAIRS)),
        BOTH,
    ),
    "flux2_double": Attention(
        **double(flux_2, rope_2, added_proj_bias=False, out_bias=False),
        call=lambda m, i: m(i["x"], i["text"], rotary_emb=TABLE_2),
    ),
    "flux2_single": Attention(
        flux_2_single,
        lambda m, i: m(i["x"], image_rotary_emb=rope_2()),
        ParallelAttention,
        lambda m, i: m(i["x"], TABLE_2),
        BOTH,
    ),
    "flux3": Attention(
        flux_3,
        lambda m, i: m(i["x"], image_rotary_emb=rope_2()),
        lambda rngs: ma.FlaxAttention(C, out_bias=False, **RMS, rngs=rngs),
        lambda m, i: m(i["x"], rotary_emb=TABLE_2),
        BOTH,
    ),
}
