"""The UNet's convolutions: residual blocks, downsampling and upsampling. Channels come last."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn_examples.common.scan import recomputed

from .sizes import Sizes

Image = Float[Array, "B H W C"]
Config = ma.AttentionConfig | None
Mesh = jax.sharding.Mesh | None


def conv3(
    width_in: int, width_out: int, *, stride: int = 1, rngs: nnx.Rngs, **how: Any
) -> nnx.Conv:
    """Make a 3 x 3 convolution, padded by one pixel on every side."""
    how = {"padding": ((1, 1), (1, 1)), "rngs": rngs, **how}
    return nnx.Conv(width_in, width_out, (3, 3), (stride, stride), **how)


def group_norm(channels: int, sizes: Sizes, eps: float, rngs: nnx.Rngs) -> nnx.GroupNorm:
    """Make a group norm that computes in float32."""
    how: dict[str, Any] = {"dtype": jnp.float32, "use_fast_variance": False, "rngs": rngs}
    return nnx.GroupNorm(channels, sizes.norm_num_groups, epsilon=eps, **how)


def activated(norm: nnx.GroupNorm, x: Image) -> Image:
    """Compute silu(norm(x)) in float32 and return it in the dtype of x.

    The backward recomputes it from x, which is cheaper than to save it in float32.
    """
    return recomputed(lambda norm, x: nnx.silu(norm(x)).astype(x.dtype), norm, x)


class ResnetBlock(nnx.Module):
    """Add the output of two convolutions, which also see the time, to an image."""

    def __init__(
        self, width_in: int, width_out: int, sizes: Sizes, *, rngs: nnx.Rngs, **how: Any
    ) -> None:
        self.norm1 = group_norm(width_in, sizes, sizes.norm_eps, rngs)
        self.conv1 = conv3(width_in, width_out, rngs=rngs, **how)
        self.time_emb_proj = nnx.Linear(sizes.time_dim, width_out, rngs=rngs, **how)
        self.norm2 = group_norm(width_out, sizes, sizes.norm_eps, rngs)
        self.conv2 = conv3(width_out, width_out, rngs=rngs, **how)
        how, same = {"rngs": rngs, **how}, width_in == width_out
        self.conv_shortcut = nnx.data(
            None if same else nnx.Conv(width_in, width_out, (1, 1), **how)
        )

    def __call__(self, x: Image, e: Float[Array, "B E"]) -> Image:
        """Run the block."""
        h = self.conv1(activated(self.norm1, x))
        h = h + self.time_emb_proj(nnx.silu(e))[:, None, None]
        h = self.conv2(activated(self.norm2, h))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Downsample(nnx.Module):
    """Halve the resolution by a convolution of stride 2."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs, **how: Any) -> None:
        self.conv = conv3(channels, channels, stride=2, rngs=rngs, **how)

    def __call__(self, x: Image) -> Image:
        """Return [B, H/2, W/2, C]."""
        return self.conv(x)


class Upsample(nnx.Module):
    """Double the resolution by repeating pixels, then convolve."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs, **how: Any) -> None:
        self.conv = conv3(channels, channels, rngs=rngs, **how)

    def __call__(self, x: Image) -> Image:
        """Return [B, 2 H, 2 W, C]."""
        b, h, w, c = x.shape
        return self.conv(jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest"))
