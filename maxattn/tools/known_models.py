"""Sizes of known models as plain numbers, so that `--help` can list the names without jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class VideoModel:
    """Attention sizes of a video model: layers, query heads, head dim, latent frames of its usual
    video, tokens per latent frame, and KV heads (0: as many as query heads).
    """

    layers: int
    heads: int
    head_dim: int
    frames: int
    tokens_per_frame: int
    kv_heads: int = 0


class KnownShape(NamedTuple):
    """Sizes of one attention; a block window is (tokens per block, blocks that a token sees)."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    head_dim: int
    role: Literal["self", "cross"] = "self"
    block_window: tuple[int, int] | None = None


# F frames have (F - 1) / 4 + 1 latent frames; a token is 16 x 16 pixels (Wan 2.2 5B: 32 x 32).
MODELS = {
    "wan-1.3b-480p": VideoModel(30, 12, 128, 21, 30 * 52),  # 81 frames of 832 x 480
    "wan-1.3b-720p": VideoModel(30, 12, 128, 21, 45 * 80),  # 81 frames of 1280 x 720
    "wan-14b-480p": VideoModel(40, 40, 128, 21, 30 * 52),
    "wan-14b-720p": VideoModel(40, 40, 128, 21, 45 * 80),
    "wan-5b-720p": VideoModel(30, 24, 128, 31, 22 * 40),  # Wan 2.2 TI2V: 121 frames of 1280 x 704
}

# Streams with a full KV cache: the model, latent frames per block, blocks in the cache.
STREAM_BLOCKS = {
    "wan-1.3b-480p-block": ("wan-1.3b-480p", 3, 7),
    "wan-1.3b-480p-block-12f": ("wan-1.3b-480p", 3, 4),
    "wan-1.3b-480p-frame": ("wan-1.3b-480p", 1, 21),
    "wan-14b-480p-block": ("wan-14b-480p", 3, 7),
    "wan-14b-480p-block-12f": ("wan-14b-480p", 3, 4),
    "wan-14b-480p-frame": ("wan-14b-480p", 1, 21),
    "wan-14b-480p-block-6f": ("wan-14b-480p", 3, 2),
    "wan-5b-720p-block": ("wan-5b-720p", 8, 4),
}


def _of_block(name: str, frames: int, window: int = 1) -> KnownShape:
    model = MODELS[name]
    tokens = frames * model.tokens_per_frame
    return KnownShape(1, tokens, window * tokens, model.heads, model.head_dim)


KNOWN_SHAPES = {
    **{name: _of_block(name, model.frames) for name, model in MODELS.items()},
    **{name: _of_block(*block) for name, block in STREAM_BLOCKS.items()},
    "wan-cross": KnownShape(1, 32760, 512, 12, 128, "cross"),  # 480p video, 512 text tokens
    "wan-14b-cross": KnownShape(1, 75600, 512, 40, 128, "cross"),
    "wan-i2v-cross": KnownShape(1, 75600, 257, 40, 128, "cross"),  # keys: the image's tokens
    "wan-5b-cross": KnownShape(1, 27280, 512, 24, 128, "cross"),
    "sdxl-64": KnownShape(16, 4096, 4096, 10, 64),  # 1024 x 1024, the 64 x 64 level
    "sdxl-32": KnownShape(16, 1024, 1024, 20, 64),
    "sdxl-cross": KnownShape(16, 4096, 77, 10, 64, "cross"),
    "sdxl-32-cross": KnownShape(16, 1024, 77, 20, 64, "cross"),
    "flux-1024": KnownShape(2, 4608, 4608, 24, 128),  # 4,096 image and 512 text tokens together
    "swba-1560x7": KnownShape(1, 32760, 32760, 12, 128, block_window=(1560, 7)),
    "swba-256x16": KnownShape(1, 32768, 32768, 12, 64, block_window=(256, 16)),
}
