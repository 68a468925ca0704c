"""The UNet's attention: the pixels of an image attend to each other and to the text."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import sharding
from maxattn.modules import KV
from maxattn.steps import run_layers
from maxattn_examples.common.layers import norm32, on_mesh
from maxattn_examples.common.scan import make_layers, map_layers

from .layers import Config, Image, Mesh, group_norm
from .sizes import Sizes

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
