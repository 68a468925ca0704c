"""The conditions of a video (time, text, and an image) as states of the model's width."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from maxattn_examples.common.layers import Embedding, FeedForward, norm32, sinusoids

from .sizes import Sizes


class Time(NamedTuple):
    """The embedding of a time, for the head and for all blocks.

    Args:
        embedding: [B, F, D] of each frame of tokens; F is 1 where a video has one time.
        modulation: [B, F, 6, D], float32.
    """

    embedding: Float[Array, "B F D"]
    modulation: Float[Array, "B F 6 D"]


class Conditions(nnx.Module):
    """Embed times, texts and images.

    Args:
        sizes: of the model.
        how: dtype and param_dtype; the embedder of times is float32 whatever they are.
        rngs: source of the initial parameters.
    """

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs, **how: Any) -> None:
        dim, image = sizes.dim, sizes.image_dim
        self.freq_dim, self.dtype = sizes.freq_dim, how.get("dtype", jnp.float32)
        # bfloat16 has too few digits for the sinusoids of 1000 times, and TPUs multiply in it
        # unless they are told.
        exact: dict[str, Any] = {"dtype": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
        self.time_embedder = Embedding(sizes.freq_dim, dim, gelu=False, rngs=rngs, **exact)
        self.time_proj = nnx.Linear(dim, 6 * dim, rngs=rngs, **how)
        self.text_embedder = Embedding(sizes.text_dim, dim, gelu=True, rngs=rngs, **how)
        embedder = None if image is None else ImageEmbedding(sizes, rngs=rngs, **how)
        self.image_embedder = nnx.data(embedder)

    def time(self, t: Float[Array, "B F"]) -> Time:
        """Embed times, 0 to 1000."""
        e = self.time_embedder(sinusoids(t, self.freq_dim)).astype(self.dtype)
        modulation = rearrange(self.time_proj(nnx.silu(e)), "B F (six D) -> B F six D", six=6)
        return Time(e, modulation.astype(jnp.float32))

    def text(self, states: Float[Array, "B S C"]) -> Float[Array, "B S D"]:
        """Embed the states of a text encoder."""
        return self.text_embedder(states)

    def image(self, states: Float[Array, "B S C"]) -> Float[Array, "B S D"]:
        """Embed the states of an image encoder; of two images, when positions are learned."""
        assert self.image_embedder is not None, "the model checks that it takes an image"
        return self.image_embedder(states)


class ImageEmbedding(nnx.Module):
    """Norm, two layers with an exact gelu, norm; learned positions where the model has them."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs, **how: Any) -> None:
        width: Any = sizes.image_dim
        self.norm1 = norm32(width, 1e-5, True, rngs)
        self.ff = FeedForward(width, width, sizes.dim, approximate=False, rngs=rngs, **how)
        self.norm2 = norm32(sizes.dim, 1e-5, True, rngs)
        tokens = sizes.pos_embed_seq_len
        positions = None if tokens is None else nnx.Param(jnp.zeros((1, tokens, width)))
        self.pos_embed = nnx.data(positions)

    def __call__(self, states: Float[Array, "B S C"]) -> Float[Array, "B S D"]:
        """Embed the image's states; with learned positions, B holds two images of each example."""
        x = states
        if self.pos_embed is not None:
            # [2 B, S, C] -> [B, 2 S, C]
            x = x.reshape(-1, 2 * x.shape[1], x.shape[2]) + self.pos_embed[...].astype(x.dtype)
        x = self.norm1(x).astype(states.dtype)
        return self.norm2(self.ff(x)).astype(states.dtype)
