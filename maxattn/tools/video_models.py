"""Sizes of known video models, and the streams that models like them are trained for."""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.streaming import Stream


@dataclass(frozen=True)
class VideoModel:
    """Hold what attention of a video model is computed on.

    Args:
        what: one line about it.
        layers: blocks of the transformer.
        heads, head_dim: N and H.
        frames: latent frames of its usual video.
        tokens_per_frame: tokens of a latent frame.
        kv_heads: K; 0 for N.
    """

    what: str
    layers: int
    heads: int
    head_dim: int
    frames: int
    tokens_per_frame: int
    kv_heads: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the whole video."""
        return self.frames * self.tokens_per_frame


# Latent frames are frames / 4 + 1, and a token stands for 16 x 16 pixels (Wan 2.2 5B: 32 x 32).
_81, _121 = 81 // 4 + 1, 121 // 4 + 1
_480P, _720P, _704P = 30 * 52, 45 * 80, 22 * 40
MODELS = {
    "wan-1.3b-480p": VideoModel("Wan 1.3B, 81 frames of 832x480", 30, 12, 128, _81, _480P),
    "wan-1.3b-720p": VideoModel("Wan 1.3B, 81 frames of 1280x720", 30, 12, 128, _81, _720P),
    "wan-14b-480p": VideoModel("Wan 14B, 81 frames of 832x480", 40, 40, 128, _81, _480P),
    "wan-14b-720p": VideoModel("Wan 14B, 81 frames of 1280x720", 40, 40, 128, _81, _720P),
    "wan-5b-720p": VideoModel(
        "Wan 2.2 TI2V 5B, 121 frames of 1280x704", 30, 24, 128, _121, _704P
    ),
}  # fmt: skip


@dataclass(frozen=True)
class BlockShape:
    """Name a block of a stream that attends over a full cache.

    Args:
        model: of `MODELS`.
        suffix: of the shape's name.
        frames: latent frames of a block.
        window: blocks in the cache, the own one included.
    """

    model: str
    suffix: str
    frames: int
    window: int

    @property
    def stream(self) -> Stream:
        """The stream that the lengths are those of."""
        return Stream(MODELS[self.model].tokens_per_frame, self.frames, self.window)

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S: tokens of the block, and of all that it sees."""
        tokens = self.stream.tokens_per_frame
        return self.frames * tokens, self.window * self.frames * tokens

    @property
    def what(self) -> str:
        """One line about it."""
        of = MODELS[self.model].what.partition(",")[0]
        frames = f"{self.frames} latent frame{'s' * (self.frames > 1)}"
        return f"{of}: a block of {frames} that sees {self.stream.budget}, over a full cache"


_BLOCKS = (("-block", 3, 7), ("-block-12f", 3, 4), ("-frame", 1, 21))
BLOCKS = (
    *(BlockShape("wan-1.3b-480p", *sizes) for sizes in _BLOCKS),
    *(BlockShape("wan-14b-480p", *sizes) for sizes in (*_BLOCKS, ("-block-6f", 3, 2))),
    BlockShape("wan-5b-720p", "-block", 8, 4),
)
