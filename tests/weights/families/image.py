"""Models of images: SD3, Qwen-Image, Z-Image, Lumina 2, Krea 2, PixArt, Sana and SDXL."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import maxattn as ma
from maxattn import masks
from maxattn.rope import rope_nd
from tests.weights.families.case import HOW, KEPT, Attention, B, C, H, N, S, attention, tensor
from tests.weights.families.positions import grid

JOINT, PLAIN = (f"attention_processor.{name}AttnProcessor2_0" for name in ("Joint", ""))
QWEN = "transformers.transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0"
Z_IMAGE = "transformers.transformer_z_image.ZSingleStreamAttnProcessor"
LUMINA = "transformers.transformer_lumina2.Lumina2AttnProcessor2_0"
SANA = "transformers.sana_transformer.SanaAttnProcessor2_0"
ROWS, COLUMNS = 2, 3
T = ROWS * COLUMNS
AXES = (2, 2, 4)
RMS: dict[str, Any] = HOW | {"qk_norm": "rms_norm"}
X, TEXT = {"x": (B, T, C)}, {"text": (B, S, C)}
TAIL = np.concatenate((np.ones((B, T), bool), KEPT), 1)
"""Tokens of a picture, then of a text, that are no padding."""


# ---- text and picture with weights of their own --------------------------------------------------


def sd3(norm: str | None, last: bool) -> Attention:
    """SD3, whose tokens have no order, so that the place of the text does not matter."""
    how: dict[str, Any] = {"qk_norm": norm, "eps": 1e-6, "bias": True}
    return Attention(
        lambda: attention(JOINT, added_kv_proj_dim=C, context_pre_only=last, out_dim=C, **how),
        lambda m, i: m(i["x"], encoder_hidden_states=i["text"])[: 1 if last else 2],
        lambda rngs: ma.JointAttention(C, C, **HOW, **how, text_out=not last, rngs=rngs),
        lambda m, i: m(i["x"], i["text"])[: 1 if last else 2],
        X | TEXT,
    )


def sd3_second() -> Attention:
    how: dict[str, Any] = {"qk_norm": "rms_norm", "eps": 1e-6, "bias": True}
    return Attention(
        lambda: attention(JOINT, out_dim=C, **how),
        lambda m, i: m(i["x"]),
        lambda rngs: ma.FlaxAttention(C, **HOW, **how, rngs=rngs),
        lambda m, i: m(i["x"]),
        X,
    )


def qwen() -> Attention:
    from_middle = [np.arange(n) - (n - n // 2) for n in (ROWS, COLUMNS)]
    first = max(ROWS // 2, COLUMNS // 2)
    text = np.repeat(np.arange(first, first + S)[:, None], 3, 1)
    table = rope_nd(AXES, np.concatenate((text, grid(1, *from_middle))))
    flags = np.concatenate((KEPT, np.ones((B, T), bool)), 1)
    how: dict[str, Any] = {"qk_norm": "rms_norm", "eps": 1e-6, "bias": True}

    def run(m: Any, i: dict[str, Any]) -> Any:
        from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

        rope = QwenEmbedRope(10000, list(AXES), scale_rope=True)([(1, ROWS, COLUMNS)], None, S)
        kept = tensor(KEPT)
        return m(i["x"], i["text"], encoder_hidden_states_mask=kept, image_rotary_emb=rope)

    return Attention(
        lambda: attention(QWEN, added_kv_proj_dim=C, context_pre_only=False, out_dim=C, **how),
        run,
        lambda rngs: ma.JointAttention(C, C, **HOW, **how, rngs=rngs),
        lambda m, i: m(i["x"], i["text"], table, masks.KeyPadding(jnp.asarray(flags))),
        X | TEXT,
    )


# ---- one sequence --------------------------------------------------------------------------------


def z_image() -> Attention:
    """Z-Image: the picture comes first, then the text, and padding last."""
    positions = np.concatenate((grid(np.array([S + 1]), ROWS, COLUMNS), _texts(S, first=1)))
    table = rope_nd(AXES, positions, theta=256)

    def run(m: Any, i: dict[str, Any]) -> Any:
        from diffusers.models.transformers.transformer_z_image import RopeEmbedder

        rope = RopeEmbedder(256.0, list(AXES), [16, 16, 16])(tensor(positions.astype(int)))
        return m(i["x"], attention_mask=tensor(TAIL), freqs_cis=rope[None])

    return Attention(
        lambda: attention(Z_IMAGE, qk_norm="rms_norm", out_bias=False),
        run,
        lambda rngs: ma.FlaxAttention(C, out_bias=False, **RMS, rngs=rngs),
        lambda m, i: m(i["x"], table, masks.KeyPadding(jnp.asarray(TAIL))),
        {"x": (B, T + S, C)},
    )


def lumina() -> Attention:
    """Lumina 2, with shared key heads, and scores scaled with the length of the sequence."""
    positions = np.concatenate((_texts(S, first=0), grid(np.array([S]), ROWS, COLUMNS)))
    table = rope_nd(AXES, positions)
    scale = np.sqrt(np.log(T + S) / np.log(4)) * H**-0.5

    def run(m: Any, i: dict[str, Any]) -> Any:
        from diffusers.models.transformers.transformer_lumina2 import Lumina2RotaryPosEmbed

        rope = Lumina2RotaryPosEmbed(10000, list(AXES), [16, 16, 16])
        freqs = rope._get_freqs_cis(tensor(positions.astype(int))[None].repeat(B, 1, 1))
        how = {"image_rotary_emb": freqs, "base_sequence_length": 4}
        return m(i["x"], i["x"], attention_mask=tensor(TAIL), **how)

    return Attention(
        lambda: attention(LUMINA, qk_norm="rms_norm", kv_heads=1, out_bias=False),
        run,
        lambda rngs: ma.FlaxAttention(
            C, kv_heads=1, out_bias=False, scale=float(scale), **RMS, rngs=rngs
        ),
        lambda m, i: m(i["x"], table, masks.KeyPadding(jnp.asarray(TAIL))),
        {"x": (B, T + S, C)},
    )


def krea() -> Attention:
    """Krea 2, with shared key heads, 1 + the scales of norms, and a gate per channel."""
    positions = np.concatenate((_texts(S, first=0), grid(1, ROWS, COLUMNS)))
    table = rope_nd(AXES, positions, theta=1000)
    keys = np.concatenate((KEPT, np.ones((B, T), bool)), 1)

    def made() -> Any:
        from diffusers.models.transformers.transformer_krea2 import Krea2Attention

        return Krea2Attention(C, N, 1)

    def run(m: Any, i: dict[str, Any]) -> Any:
        from diffusers.models.transformers.transformer_krea2 import Krea2RotaryPosEmbed

        rope = Krea2RotaryPosEmbed(1000, list(AXES))(tensor(positions))
        return m(i["x"], attention_mask=tensor(keys[:, None, None]), image_rotary_emb=rope)

    how: dict[str, Any] = {"qk_norm": "zero_centred_rms_norm", "gate": "per_channel"}
    return Attention(
        made,
        run,
        lambda rngs: ma.FlaxAttention(C, kv_heads=1, out_bias=False, **HOW, **how, rngs=rngs),
        lambda m, i: m(i["x"], table, masks.KeyPadding(jnp.asarray(keys))),
        {"x": (B, S + T, C)},
    )


def _texts(tokens: int, first: int) -> Any:
    """Count a text's tokens on the first of three axes."""
    return np.pad(np.arange(first, first + tokens)[:, None], ((0, 0), (0, 2))).astype(float)


# ---- attention to a text with padding ------------------------------------------------------------


def to_text(name: str, width: int, norm: str | None = None, **how: Any) -> Attention:
    """Mask padding by a bias of -10000, as the models do from their flags."""
    hidden = np.float32(-10000) * ~KEPT[:, None]
    theirs: dict[str, Any] = how | {"cross_attention_dim": width, "qk_norm": norm}
    if norm is not None:
        theirs["kv_heads"] = N
    return Attention(
        lambda: attention(name, **theirs),
        lambda m, i: m(i["x"], i["text"], attention_mask=tensor(hidden)),
        lambda rngs: ma.CrossAttention(C, width, **HOW, **how, qk_norm=norm, rngs=rngs),
        lambda m, i: m(i["x"], i["text"], mask=masks.KeyPadding(jnp.asarray(KEPT))),
        X | {"text": (B, S, width)},
    )


def pixart_self() -> Attention:
    return Attention(
        lambda: attention(PLAIN, bias=True),
        lambda m, i: m(i["x"]),
        lambda rngs: ma.FlaxAttention(C, bias=True, **HOW, rngs=rngs),
        lambda m, i: m(i["x"]),
        X,
    )


ATTENTIONS = {
    "sd3": sd3(None, last=False),
    "sd3_last": sd3(None, last=True),
    "sd35": sd3("rms_norm", last=False),
    "sd35_second": sd3_second(),
    "qwen_image": qwen(),
    "z_image": z_image(),
    "lumina2": lumina(),
    "krea2": krea(),
    "pixart_self": pixart_self(),
    "pixart_cross": to_text(PLAIN, C, bias=True),
    "sana_cross": to_text(SANA, C, bias=True),
    "sana_sprint_cross": to_text(SANA, C, "rms_norm_across_heads", bias=True),
    "sdxl_cross_masked": to_text(PLAIN, 12),
}
