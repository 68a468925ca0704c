"""Sizes of a transformer like Wan's and of a block of video that it streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Hold sizes of the model and of a block; the defaults are Wan 2.1 1.3B's at 832x480.

    Args:
        heads, head_dim: N and H.
        layers, inner: how many, and the width inside their feed-forward part.
        rows, columns: tokens of a latent frame.
        channels: of a token's latents.
        text: tokens of the text.
        times: sinusoids of the time.
        own: frames of a block.
        slots: frames that the cache holds.
        sink: first frames that stay in it.
        first: the block sees itself alone, as the first of a video does.
    """

    heads: int = 12
    head_dim: int = 128
    layers: int = 30
    inner: int = 8960
    rows: int = 30
    columns: int = 52
    channels: int = 64
    text: int = 512
    times: int = 256
    own: int = 3
    slots: int = 21
    sink: int = 0
    first: bool = False

    @property
    def width(self) -> int:
        """Channels of a token inside the model."""
        return self.heads * self.head_dim

    @property
    def frame(self) -> int:
        """Tokens of a frame."""
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """T."""
        return self.own * self.frame
