"""`Reel`: a video that is being made, after some blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

import maxattn as ma

Latents = Float[Array, "B F H W C"]


@dataclass(frozen=True, eq=False)
class Reel:
    """The state that the next block is made from. Its cache can be continued once.

    Args:
        told: what the model is told, for every block from here on.
        batch: videos that are made side by side.
        frame: the number of the next frame.
        cache: keys and values of the frames that are kept; None where each block runs its context
            anew.
        clean: (first frame, latents) of the blocks that later ones may need: those with a frame
            that is kept.
    """

    told: Any
    batch: int
    frame: int = 0
    cache: ma.KVCache | None = None
    clean: tuple[tuple[int, Latents], ...] = ()

    def with_clean(self, latents: Latents, kept: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the clean blocks with one more, less those of which nothing is kept.

        Args:
            latents: of the block that follows.
            kept: the frames that are kept from then on.
        """
        blocks = (*self.clean, (self.frame, latents))
        return tuple(b for b in blocks if any(b[0] <= f < b[0] + b[1].shape[1] for f in kept))

    def frames(self, numbers: tuple[int, ...]) -> Latents:
        """Return the clean latents of frames.

        Args:
            numbers: of frames that are kept.
        """
        of_frame = {
            start + i: block[:, i] for start, block in self.clean for i in range(block.shape[1])
        }
        return jnp.stack([of_frame[f] for f in numbers], axis=1)
