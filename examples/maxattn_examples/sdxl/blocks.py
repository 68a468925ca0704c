"""The UNet's blocks: attention to pixels and text, residual convolutions, resampling."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import sharding
from maxattn.modules import KV
from maxattn.steps import run_layers
from maxattn_examples.common.compiled import make_layers, map_layers, recomputed
from maxattn_examples.common.layers import norm32, on_mesh

from .settings import Sizes

Image = Float[Array, "B H W C"]
Config = ma.AttentionConfig | None
Mesh = jax.sharding.Mesh | None
Tokens = Float[Array, "B T C"]
Text = Float[Array, "B S D"]
LayersKV = KV | tuple[KV, ...]


class Transformer(nnx.Module):
    """Turn an image into tokens, run attention blocks, and add their output to the image."""

    diffusers_stacked: ClassVar[tuple[str, ...]] = ("transformer_blocks",)

    def __init__(
        self,
        channels: int,
        heads: int,
        layers: int,
        sizes: Sizes,
        config: Config,
        mesh: Mesh,
        scan_layers: bool = True,
        *,
        rngs: nnx.Rngs,
        **how: Any,
    ) -> None:
        self.config, self.mesh = config, mesh
        self.norm = group_norm(channels, sizes, 1e-6, rngs)
        self.proj_in = nnx.Linear(channels, channels, rngs=rngs, **how)
        self.transformer_blocks = make_layers(
            lambda rngs: Block(channels, heads, sizes, config, mesh, rngs=rngs, **how),
            layers,
            rngs,
            scan_layers,
        )
        self.proj_out = nnx.Linear(channels, channels, rngs=rngs, **how)

    def encode(self, text: Text) -> LayersKV:
        """Compute every block's keys and values of a text, stacked if the blocks are scanned."""
        return map_layers(lambda block: block.attn2.compute_kv(text), self.transformer_blocks)

    def __call__(self, x: Image, text: Text | None, kv: LayersKV | None = None) -> Image:
        """Attend to the image and to the text, given as states or as keys and values."""
        # Rows of an image stay on one device. Tokens split over context would make the compiler
        # split convolutions as well, and with fewer rows than devices it gets their gradients wrong
        # (seen with jax 0.10.2 on CPU).
        x = sharding.constrain(x, self.mesh, "B...")
        tokens = self.proj_in(rearrange(self.norm(x).astype(x.dtype), "B H W C -> B (H W) C"))
        run = ma.remat(Block.__call__, self.config)

        def step(block: Block, tokens: Tokens, kv: KV | None, _: Any) -> Tokens:
            return run(block, tokens, text, kv)

        tokens = run_layers(step, self.transformer_blocks, tokens, kv)
        y = rearrange(self.proj_out(tokens), "B (H W) C -> B H W C", H=x.shape[1])
        return x + sharding.constrain(y, self.mesh, "B...")


class Block(nnx.Module):
    """Self-attention, cross-attention to the text, gated feed-forward: residual, with norms."""

    def __init__(
        self,
        channels: int,
        heads: int,
        sizes: Sizes,
        config: Config,
        mesh: Mesh,
        *,
        rngs: nnx.Rngs,
        **how: Any,
    ) -> None:
        where = {"config": config, "mesh": mesh, "rngs": rngs}
        attention: dict[str, Any] = {"heads": heads, "dim_head": channels // heads, **where, **how}
        self.mesh = mesh
        self.norm1, self.norm2, self.norm3 = (norm32(channels, 1e-5, True, rngs) for _ in range(3))
        self.attn1 = ma.FlaxAttention(channels, **attention)
        self.attn2 = ma.CrossAttention(channels, sizes.cross_attention_dim, **attention)
        self.ff = GatedFeedForward(channels, rngs=rngs, **how)

    def __call__(self, x: Tokens, text: Text | None, kv: KV | None = None) -> Tokens:
        """Run the three layers.

        Args:
            text: states of the text encoders, or None if `kv` is given.
            kv: keys and values of the text, from `attn2.compute_kv`.
        """
        x = x + self.attn1(self.norm1(x).astype(x.dtype))
        x = x + self.attn2(self.norm2(x).astype(x.dtype), text, kv)
        x = x + self.ff(self.norm3(x).astype(x.dtype))
        return sharding.constrain(x, self.mesh, "BT.")


class GatedFeedForward(nnx.Module):
    """Compute down(a * gelu(b)), where a and b are the halves of up(x)."""

    diffusers_names: ClassVar[dict[str, str]] = {"up": "net.0.proj", "down": "net.2"}

    def __init__(self, dim: int, *, rngs: nnx.Rngs, **how: Any) -> None:
        how = {"rngs": rngs, **how}
        self.up = nnx.Linear(dim, 8 * dim, kernel_metadata=on_mesh("fsdp", "tensor"), **how)
        self.down = nnx.Linear(4 * dim, dim, kernel_metadata=on_mesh("tensor", "fsdp"), **how)

    def __call__(self, x: Tokens) -> Tokens:
        """Run both layers on every token."""
        value, gate = jax.numpy.split(self.up(x), 2, axis=-1)
        return self.down(value * nnx.gelu(gate, approximate=False))


# ---- on images -----------------------------------------------------------------------------------


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
