"""Models of videos: Wan, CogVideoX, Mochi, Kandinsky 5 and MiniMax-H3."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

import maxattn as ma
from maxattn import masks
from maxattn.rope import rope_nd
from tests.weights.families.case import DENSE, HOW, KEPT, Attention, B, C, H, N, S, tensor
from tests.weights.families.positions import grid, still

FRAMES, ROWS, COLUMNS = 2, 2, 2
T = FRAMES * ROWS * COLUMNS
SIZES = (FRAMES, ROWS, COLUMNS)
GRID = grid(*SIZES)
X, TEXT = {"x": (B, T, C)}, {"text": (B, S, C)}


# ---- Wan -----------------------------------------------------------------------------------------


def wan(**how: Any) -> Any:
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    return WanAttention(C, heads=N, dim_head=H, eps=1e-6, processor=WanAttnProcessor(), **how)


WAN: dict[str, Any] = HOW | {"bias": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6}


def wan_self() -> Attention:
    def run(m: Any, i: dict[str, Any]) -> Any:
        import torch
        from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

        return m(i["x"], rotary_emb=WanRotaryPosEmbed(H, (1, 1, 1), 8)(torch.zeros(1, 1, *SIZES)))

    return Attention(
        wan,
        run,
        lambda rngs: ma.FlaxAttention(C, **WAN, rngs=rngs),
        lambda m, i: m(i["x"], rotary_emb=ma.rope_3d(H, *SIZES)),
        X,
    )


def wan_cross() -> Attention:
    return Attention(
        lambda: wan(cross_attention_dim_head=H),
        lambda m, i: m(i["x"], i["text"]),
        lambda rngs: ma.CrossAttention(C, **WAN, rngs=rngs),
        lambda m, i: m(i["x"], i["text"]),
        X | TEXT,
    )


# ---- CogVideoX and Mochi -------------------------------------------------------------------------

COG_H = 16
COG_C = N * COG_H
"""A head of CogVideoX turns in three parts: 1/4, 3/8 and 3/8 of its channels."""


def cogvideox() -> Attention:
    axes = (COG_H // 4, COG_H * 3 // 8, COG_H * 3 // 8)
    table = rope_nd(axes, np.concatenate((still(S), GRID)))
    how: dict[str, Any] = {"heads": N, "dim_head": COG_H, "bias": True, "qk_norm": "layer_norm"}
    how["eps"] = 1e-6

    def made() -> Any:
        from diffusers.models.attention_processor import Attention as Theirs
        from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0

        return Theirs(COG_C, processor=CogVideoXAttnProcessor2_0(), **how)

    def run(m: Any, i: dict[str, Any]) -> Any:
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        area = ((0, 0), (ROWS, COLUMNS))
        rope = get_3d_rotary_pos_embed(COG_H, area, (ROWS, COLUMNS), FRAMES)
        picture, text = m(i["x"], encoder_hidden_states=i["text"], image_rotary_emb=rope)
        return text, picture

    return Attention(
        made,
        run,
        lambda rngs: ma.FlaxAttention(COG_C, **how, config=DENSE, rngs=rngs),
        lambda m, i: jnp.split(
            m(jnp.concatenate((i["text"], i["x"]), 1), rotary_emb=table), [S], axis=1
        ),
        {"x": (B, T, COG_C), "text": (B, S, COG_C)},
    )


KEYS = np.concatenate((KEPT, np.ones((B, T), bool)), 1)
MOCHI_TEXT = 12
MOCHI_ROPE = np.random.RandomState(7).standard_normal((3, N, H // 2)).astype(np.float32)
"""Frequencies of Mochi, a parameter of the model: of each axis, head and pair of channels."""


def mochi(last: bool) -> Attention:
    """Mochi, whose heads have their own angles; padding attends to nothing and is masked."""
    middle = (np.arange(ROWS) - (ROWS - 1) / 2) * 192 / np.sqrt(ROWS * COLUMNS)
    angles = np.einsum("td,dnf->tnf", grid(FRAMES, middle, middle), MOCHI_ROPE)
    angles = np.concatenate((np.zeros((S, *angles.shape[1:])), angles))[None]
    table = ma.Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    ids = jnp.asarray(np.where(KEYS, 0, -1))
    how: dict[str, Any] = {"added_kv_proj_dim": MOCHI_TEXT, "added_proj_bias": False}

    def made() -> Any:
        from diffusers.models.attention_processor import MochiAttention, MochiAttnProcessor2_0

        more = {"out_dim": C, "out_context_dim": MOCHI_TEXT, "context_pre_only": last}
        sizes = {"heads": N, "dim_head": H, "eps": 1e-5, "processor": MochiAttnProcessor2_0()}
        return MochiAttention(C, **sizes, **how, **more)

    def run(m: Any, i: dict[str, Any]) -> Any:
        import torch
        from diffusers.models.transformers.transformer_mochi import MochiRoPE

        rope = MochiRoPE()(tensor(MOCHI_ROPE), *SIZES, dtype=torch.float32)
        kept = tensor(KEPT)
        found = m(i["x"], i["text"], attention_mask=kept, image_rotary_emb=rope)
        return found[: 1 if last else 2]

    return Attention(
        made,
        run,
        lambda rngs: ma.JointAttention(
            C, text_out=not last, qk_norm="rms_norm", **HOW, **how, rngs=rngs
        ),
        lambda m, i: m(i["x"], i["text"], table, masks.Segments(ids, ids))[: 1 if last else 2],
        X | {"text": (B, S, MOCHI_TEXT)},
    )


# ---- Kandinsky 5 ---------------------------------------------------------------------------------


class KandinskyAttention(ma.FlaxAttention):
    """Parameters with Kandinsky 5's names."""

    diffusers_names: ClassVar[dict[str, str]] = {
        "to_q": "to_query", "to_k": "to_key", "to_v": "to_value", "to_out": "out_layer",
        "norm_q": "query_norm", "norm_k": "key_norm",
    }  # fmt: skip


class KandinskyCross(ma.CrossAttention):
    """Parameters with Kandinsky 5's names."""

    diffusers_names: ClassVar[dict[str, str]] = KandinskyAttention.diffusers_names


KANDINSKY: dict[str, Any] = HOW | {"bias": True, "qk_norm": "rms_norm"}
KANDINSKY["eps"] = float(np.finfo(np.float32).eps)


def kandinsky() -> Any:
    from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Attention

    return Kandinsky5Attention(C, H)


def kandinsky_self() -> Attention:
    """Compare without diffusers' rounding of rotated queries and keys to bfloat16."""
    table = rope_nd((2, 2, 4), GRID)

    def run(m: Any, i: dict[str, Any]) -> Any:
        from unittest.mock import patch

        import torch
        from diffusers.models.transformers.transformer_kandinsky import Kandinsky5RoPE3D

        places = [torch.arange(n) for n in SIZES]
        rope = Kandinsky5RoPE3D((2, 2, 4))((1, *SIZES), places).reshape(1, T, 1, H // 2, 2, 2)
        with patch.object(torch, "bfloat16", torch.float32):
            return m(i["x"], rotary_emb=rope)

    return Attention(
        kandinsky,
        run,
        lambda rngs: KandinskyAttention(C, **KANDINSKY, rngs=rngs),
        lambda m, i: m(i["x"], rotary_emb=table),
        X,
    )


def kandinsky_cross() -> Attention:
    return Attention(
        kandinsky,
        lambda m, i: m(i["x"], i["text"]),
        lambda rngs: KandinskyCross(C, **KANDINSKY, rngs=rngs),
        lambda m, i: m(i["x"], i["text"]),
        X | TEXT,
    )


# ---- MiniMax-H3 ----------------------------------------------------------------------------------


def minimax_h3() -> Attention:
    """Rotate 6 of 8 channels of each head, in halves; the heads are wider than the tokens."""
    table = rope_nd((2, 2, 2), GRID, theta=100, style="half")
    table = ma.Rotary(table.cos, table.sin, "half", partial=True)
    width = 12

    def made() -> Any:
        from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention

        return MiniMaxH3Attention(width, N, H)

    def run(m: Any, i: dict[str, Any]) -> Any:
        from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed

        return m(i["x"], MiniMaxH3RotaryPosEmbed(1, 100.0)(tensor(GRID)))

    return Attention(
        made,
        run,
        lambda rngs: ma.FlaxAttention(width, out_bias=False, qk_norm="rms_norm", **HOW, rngs=rngs),
        lambda m, i: m(i["x"], rotary_emb=table),
        {"x": (B, T, width)},
    )


ATTENTIONS = {
    "wan_self": wan_self(),
    "wan_cross": wan_cross(),
    "cogvideox": cogvideox(),
    "mochi": mochi(last=False),
    "mochi_last": mochi(last=True),
    "kandinsky5_self": kandinsky_self(),
    "kandinsky5_cross": kandinsky_cross(),
    "minimax_h3": minimax_h3(),
}
