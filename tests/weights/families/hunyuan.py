"""HunyuanVideo and HunyuanVideo 1.5, whose text comes last."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import maxattn as ma
from maxattn import masks
from maxattn.rope import rope_nd
from tests.weights.families.case import HOW, KEPT, Attention, B, C, S, attention, tensor
from tests.weights.families.positions import grid, still

SIZES = (2, 2, 2)
"""Frames, rows, columns."""
T = 8
GRID = grid(*SIZES)
X, TEXT = {"x": (B, T, C)}, {"text": (B, S, C)}
RMS: dict[str, Any] = {"bias": True, "qk_norm": "rms_norm", "eps": 1e-6}
HUNYUAN_AXES = (2, 2, 4)
KEYS = np.concatenate((KEPT, np.ones((B, T), bool)), 1)


def hunyuan_rope() -> Any:
    import torch
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoRotaryPosEmbed

    return HunyuanVideoRotaryPosEmbed(1, 1, list(HUNYUAN_AXES))(torch.zeros(1, 1, *SIZES))


def hunyuan_table(*positions: Any) -> ma.Rotary:
    return rope_nd(HUNYUAN_AXES, np.concatenate(positions), theta=256)


HUNYUAN = "transformers.transformer_hunyuan_video.HunyuanVideoAttnProcessor2_0"
HUNYUAN_15 = "transformers.transformer_hunyuan_video15.HunyuanVideo15AttnProcessor2_0"
LAST = np.concatenate((np.ones((B, T), bool), KEPT), 1)
IDS = jnp.asarray(np.where(KEYS, 0, -1))


def run(flags: np.ndarray) -> Any:
    """Call diffusers' module with the text last."""
    return lambda m, i: m(
        i["x"],
        encoder_hidden_states=i["text"],
        attention_mask=tensor(flags),
        image_rotary_emb=hunyuan_rope(),
    )


def double(processor: str, flags: np.ndarray, mask: Any) -> Attention:
    """Reorder inputs: our text comes first, as do its parts of mask and table."""
    table = hunyuan_table(still(S), GRID)
    how = RMS | {"added_kv_proj_dim": C, "context_pre_only": False, "out_dim": C}
    return Attention(
        lambda: attention(processor, **how),
        run(flags),
        lambda rngs: ma.JointAttention(C, C, **HOW, **RMS, rngs=rngs),
        lambda m, i: m(i["x"], i["text"], table, mask),
        X | TEXT,
    )


def single() -> Attention:
    table = hunyuan_table(GRID, still(S))

    def call(m: Any, i: dict[str, Any]) -> Any:
        both = jnp.concatenate((i["x"], i["text"]), 1)
        y = m(both, table, masks.KeyPadding(jnp.asarray(LAST)))
        return y[:, :T], y[:, T:]

    return Attention(
        lambda: attention(HUNYUAN, pre_only=True, out_dim=C, **RMS),
        run(LAST[:, None, None]),
        lambda rngs: ma.FlaxAttention(C, out_proj=False, **HOW, **RMS, rngs=rngs),
        call,
        X | TEXT,
    )


ATTENTIONS = {
    "hunyuan_video_double": double(
        HUNYUAN, LAST[:, None, None], masks.KeyPadding(jnp.asarray(KEYS))
    ),
    "hunyuan_video_single": single(),
    # The text's padding is hidden as keys and as queries: such a query sees nothing, and gives 0.
    "hunyuan_video_15": double(HUNYUAN_15, KEPT, masks.Segments(IDS, IDS)),
}
