"""Clips whose prompt changes at a block, as a rollout that changes it in the middle sees them.

After a change of prompt a rollout runs the frames that it keeps again under the new prompt. So a
block has the new prompt, and behind it frames of the old digit, of both digits, or of the new one
after a sink of the old one. Place and direction go on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import maxattn as ma

from .model import Video


def switched(
    key: Array, video: Video, before: Video, share: Float[Array, " B"], stream: ma.Stream
) -> Video:
    """Show another digit in the frames before a block that is drawn, in some of the clips.

    Args:
        key: of what is drawn.
        video: clips of the digits that the prompts say.
        before: clips of other digits, at the same places.
        share: how likely each clip changes.
        stream: the blocks; the first one never shows the digit after a change.
    """
    count, frames = video.shape[:2]
    for_some, for_block = jax.random.split(key)
    starts = jnp.asarray([start for start, _ in stream.blocks(frames)][1:])
    at = jax.random.choice(for_block, starts, (count, 1))
    some = jax.random.bernoulli(for_some, share[:, None])
    old = some & (jnp.arange(frames) < at)
    return jnp.where(old[..., None, None, None], before, video)
