"""LTX-Video and LTX-2, whose heads have different rotary angles."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import maxattn as ma
from maxattn import masks
from tests.weights.families.case import DENSE, HOW, KEPT, Attention, B, C, H, N, S, tensor
from tests.weights.families.positions import grid, of_channels

FRAMES, ROWS, COLUMNS = 2, 2, 2
SIZES = (FRAMES, ROWS, COLUMNS)
T = FRAMES * ROWS * COLUMNS
AUDIO_H, SOUNDS = 4, 5
AUDIO_C = N * AUDIO_H
X, TEXT = {"x": (B, T, C)}, {"text": (B, S, C)}
LTX: dict[str, Any] = {"bias": True, "qk_norm": "rms_norm_across_heads"}
HEADS: dict[str, Any] = LTX | {"heads": N, "config": DENSE, "eps": 1e-6}


def table(angles: Any, style: str, head_dim: int = H) -> ma.Rotary:
    """Split the angles [B, T, N * H / 2] of all channels by head."""
    of_heads = angles.reshape(*angles.shape[:2], N, head_dim // 2)
    cos, sin = (f(of_heads).astype(np.float32) for f in (np.cos, np.sin))
    return ma.Rotary(cos, sin, style)


# ---- LTX-Video -----------------------------------------------------------------------------------


def ltx(cross: bool) -> Attention:
    def made() -> Any:
        from diffusers.models.transformers.transformer_ltx import LTXAttention

        return LTXAttention(C, N, N, H, cross_attention_dim=C if cross else None)

    def run(m: Any, i: dict[str, Any]) -> Any:
        from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed

        if cross:
            return m(i["x"], i["text"], tensor(np.float32(-10000) * ~KEPT[:, None]))
        scale = (0.3, 32, 32)
        return m(i["x"], image_rotary_emb=LTXVideoRotaryPosEmbed(C)(i["x"], *SIZES, scale))

    turned = table(
        of_channels(grid(*SIZES)[None] * (0.3 / 20, 32 / 2048, 32 / 2048), C), "interleaved"
    )

    def call(m: Any, i: dict[str, Any]) -> Any:
        if cross:
            return m(i["x"], i["text"], mask=masks.KeyPadding(jnp.asarray(KEPT)))
        return m(i["x"], rotary_emb=turned)

    kind = ma.CrossAttention if cross else ma.FlaxAttention
    return Attention(
        made, run, lambda rngs: kind(C, **HOW, **LTX, rngs=rngs), call, X | (TEXT if cross else {})
    )


# ---- LTX-2 ---------------------------------------------------------------------------------------


def ltx_2(how: dict[str, Any], **sizes: Any) -> Any:
    from diffusers.models.transformers.transformer_ltx2 import LTX2Attention

    gated = {"apply_gated_attention": True}
    return LTX2Attention(heads=N, kv_heads=N, **sizes, **how, **gated)


def ltx_2_rope(rope_type: str, modality: str, width: int, *sizes: int, **how: Any) -> Any:
    from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

    more: dict[str, Any] = {"rope_type": rope_type, "num_attention_heads": N, "modality": modality}
    if modality == "audio":
        more["scale_factors"] = (4,)
    rope = LTX2AudioVideoRotaryPosEmbed(width, **more, **how)
    return rope, rope.prepare_coords(B, *sizes, "cpu")


def seconds(frames: int) -> Any:
    """Return the mid-times of latent frames: one frame in the first, then 8, at 24 per second."""
    ends = np.maximum(np.arange(frames + 1) * 8 - 7, 0) / 24
    return (ends[1:] + ends[:-1]) / 2


def sound_seconds() -> Any:
    """Return the mid-times of latent sounds: one step in the first, then 4, at 100 per second."""
    ends = np.maximum(np.arange(SOUNDS + 1) * 4 - 3, 0) / 100
    return (ends[1:] + ends[:-1]) / 2


def ltx_2_self(rope_type: str, style: str) -> Attention:
    """Rotate all channels of a token: pairs of neighbours, or halves of each head."""
    spots = grid(seconds(FRAMES), np.arange(ROWS) * 32 + 16.0, np.arange(COLUMNS) * 32 + 16.0)
    turned = table(of_channels(spots[None] / (20, 2048, 2048), C), style)

    def run(m: Any, i: dict[str, Any]) -> Any:
        rope, coords = ltx_2_rope(rope_type, "video", C, *SIZES)
        return m(i["x"], query_rotary_emb=rope(coords))

    return Attention(
        lambda: ltx_2({"rope_type": rope_type}, query_dim=C, dim_head=H),
        run,
        lambda rngs: ma.FlaxAttention(C, dim_head=H, gate="per_head", **HEADS, rngs=rngs),
        lambda m, i: m(i["x"], rotary_emb=turned),
        X,
    )


def ltx_2_audio_to_video() -> Attention:
    """Attend from a video to its sound, both at times in seconds, with the heads of the sound."""
    of_video = grid(seconds(FRAMES), np.zeros(ROWS), np.zeros(COLUMNS))[None, :, :1] / 20
    of_audio = sound_seconds()[None, :, None] / 20
    q, k = (table(of_channels(p, AUDIO_C), "half", AUDIO_H) for p in (of_video, of_audio))

    def run(m: Any, i: dict[str, Any]) -> Any:
        rope, coords = ltx_2_rope("split", "video", AUDIO_C, *SIZES)
        audio, times = ltx_2_rope("split", "audio", AUDIO_C, SOUNDS)
        tables = rope(coords[:, 0:1]), audio(times[:, 0:1])
        return m(i["x"], i["audio"], None, *tables)

    return Attention(
        lambda: ltx_2(
            {"rope_type": "split"}, query_dim=C, cross_attention_dim=AUDIO_C, dim_head=AUDIO_H
        ),
        run,
        lambda rngs: ma.CrossAttention(
            C, AUDIO_C, dim_head=AUDIO_H, gate="per_head", **HEADS, rngs=rngs
        ),
        lambda m, i: m(i["x"], i["audio"], rotary_emb=q, rotary_emb_k=k),
        X | {"audio": (B, SOUNDS, AUDIO_C)},
    )


ATTENTIONS = {
    "ltx_video_self": ltx(cross=False),
    "ltx_video_cross": ltx(cross=True),
    "ltx2_self": ltx_2_self("split", "half"),
    "ltx2_self_interleaved": ltx_2_self("interleaved", "interleaved"),
    "ltx2_audio_to_video": ltx_2_audio_to_video(),
}
