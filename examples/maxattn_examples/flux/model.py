"""Flux.1's transformer: predict a velocity from noisy latents, time, text and guidance.

    e = time + guidance + pooled text;  c = text;  x = 2 x 2 patches of the latents
    x, c = double blocks(x, c, e);  [c, x] = single blocks([c, x], e)
    velocity = unpatchify(linear(norm(x) * (1 + scale) + shift)),  (scale, shift) = linear(silu(e))

Guidance is an input of FLUX.1-dev, which was distilled from a model with classifier-free guidance;
FLUX.1-schnell has none.

Axes: B batch, T tokens of the picture, S of the text, D width; H, W, C rows, columns and channels
of the latents.

Source: Flux.1, https://github.com/black-forest-labs/flux; parameter names are those of diffusers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import sharding
from maxattn.errors import InputError
from maxattn.modules import adaptive_norm
from maxattn.steps import Layers, count_layers, run_layers
from maxattn_examples.common.compiled import make_layers
from maxattn_examples.common.layers import Embedding, left_open, on_mesh, residual, sinusoids

from .block import FluxBlock, FluxSingleBlock, Modulation, Tokens, positions
from .settings import PATCH, Sizes

Latents = Float[Array, "B H W C"]
FREQUENCIES = 256  # numbers that write a time or a guidance
GUIDANCE_UNIT = 1000.0  # sinusoids are of times up to 1000, and of guidance times so much


class FluxConditions(nnx.Module):
    """Sum the embeddings of time, guidance and pooled text.

    Args:
        how: dtype and param_dtype; times and guidance are always embedded in float32.
    """

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs, **how: Any) -> None:
        self.dtype = how.get("dtype", jnp.float32)
        # bfloat16 has too few digits for the sinusoids of 1000 times, and TPUs multiply in it
        # unless they are told.
        exact = {**how, "dtype": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
        number: dict[str, Any] = {"gelu": False, "rngs": rngs, **exact}
        self.timestep_embedder = Embedding(FREQUENCIES, sizes.dim, **number)
        guidance = Embedding(FREQUENCIES, sizes.dim, **number) if sizes.guidance_embeds else None
        self.guidance_embedder = nnx.data(guidance)
        width = sizes.pooled_projection_dim
        self.text_embedder = Embedding(width, sizes.dim, gelu=False, rngs=rngs, **how)

    def __call__(
        self, t: Float[Array, " B"], pooled: Float[Array, "B P"], guidance: Array | None
    ) -> Float[Array, "B D"]:
        """Return the sum of the embeddings of time, guidance and pooled text."""
        numbers = self.timestep_embedder(sinusoids(t, FREQUENCIES))
        if self.guidance_embedder is not None and guidance is not None:
            said = sinusoids(GUIDANCE_UNIT * guidance, FREQUENCIES)
            numbers = numbers + self.guidance_embedder(said)
        return numbers.astype(self.dtype) + self.text_embedder(pooled.astype(self.dtype))


class FluxTransformer2D(nnx.Module):
    """Predict the velocity of noisy latents.

    Args:
        sizes: `SIZES[...]`, or `Sizes.of_folder(...)`.
        config: attention's settings; its `remat_policy` chooses what each block saves in training.
        dtype: of the computation, default float32; norms, modulation and softmax are always
            float32.
        scan_layers: True (default) stacks the blocks' parameters and scans, so that a block
            compiles
            once. False compiles each block, with weights of its own.
    """

    diffusers_names: ClassVar[dict[str, str]] = {"conditions": "time_text_embed"}
    diffusers_stacked: ClassVar[tuple[str, ...]] = (
        "transformer_blocks",
        "single_transformer_blocks",
    )

    def __init__(
        self,
        sizes: Sizes,
        config: ma.AttentionConfig | None = None,
        mesh: jax.sharding.Mesh | None = None,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        scan_layers: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        how: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.sizes, self.config, self.mesh, self.dtype = sizes, config, mesh, dtype
        dim, build = sizes.dim, (sizes.dim, sizes.num_attention_heads, config, mesh)
        linear: dict[str, Any] = {"kernel_metadata": on_mesh("fsdp", None), "rngs": rngs, **how}
        self.conditions = FluxConditions(sizes, rngs=rngs, **how)
        self.context_embedder = nnx.Linear(sizes.joint_attention_dim, dim, **linear)
        self.x_embedder = nnx.Linear(sizes.in_channels, dim, **linear)
        self.transformer_blocks = make_layers(
            lambda rngs: FluxBlock(*build, rngs=rngs, **how), sizes.num_layers, rngs, scan_layers
        )
        self.single_transformer_blocks = make_layers(
            lambda rngs: FluxSingleBlock(*build, apart=not scan_layers, rngs=rngs, **how),
            sizes.num_single_layers,
            rngs,
            scan_layers,
        )
        self.norm_out = Modulation(dim, 2, mesh, rngs=rngs, **how)
        self.proj_out = nnx.Linear(dim, sizes.in_channels, rngs=rngs, **how)

    def __call__(
        self,
        latents: Latents,
        t: Float[Array, " B"],
        text: Float[Array, "B S K"],
        pooled: Float[Array, "B P"],
        guidance: Float[Array, " B"] | None = None,
    ) -> Latents:
        """Predict the velocity.

        Args:
            t: time of each picture, 0 (clean) to 1000 (noise).
            text: states of the T5 encoder, [B, S, joint_attention_dim].
            pooled: pooled vector of the CLIP encoder, [B, pooled_projection_dim].
            guidance: of each picture, if `guidance_embeds`; 3.5 is usual.
        """
        self._check(latents, text, pooled, guidance)
        _, height, width, _ = latents.shape
        rows, columns, s = height // PATCH, width // PATCH, text.shape[1]
        rotary = positions(s, rows, columns, self.sizes.axes_dims_rope)
        e = self.conditions(t, pooled, guidance)
        patches = "B (H h) (W w) C -> B (H W) (C h w)"
        x = rearrange(latents.astype(self.dtype), patches, h=PATCH, w=PATCH)
        x = sharding.constrain(self.x_embedder(x), self.mesh, "BT.")
        c = self.context_embedder(text.astype(self.dtype))
        x, _ = ma.blocks(self._layers(e, rotary), (x, c))
        scale, shift = self.norm_out(e)
        _, x = adaptive_norm(x, self.norm_out.norm, scale, shift, mesh=self.mesh)
        x = self.proj_out(x)
        grid = {"H": rows, "W": columns, "h": PATCH, "w": PATCH}
        return rearrange(x, "B (H W) (C h w) -> B (H h) (W w) C", **grid)

    def _layers(self, e: Array, rotary: ma.Rotary) -> Layers:
        double = ma.remat(FluxBlock.__call__, self.config)
        single = ma.remat(FluxSingleBlock.__call__, self.config)

        add = not left_open(self.transformer_blocks, self.config)

        def on_two(block: FluxBlock, both: tuple[Any, Any], *_: Any) -> Any:
            return double(block, *both, e, rotary, add)

        def on_one(block: FluxSingleBlock, both: Any, *_: Any) -> Any:
            return single(block, both, e, rotary, add)

        doubles = count_layers(self.transformer_blocks)
        singles = count_layers(self.single_transformer_blocks)

        def part(both: tuple[Tokens, Tokens], span: range) -> tuple[Tokens, Tokens]:
            first = range(span.start, min(span.stop, doubles))
            rest = range(max(span.start, doubles) - doubles, span.stop - doubles)
            if first:
                x, c = run_layers(on_two, self.transformer_blocks, both, None, first)
                both = residual(x).total, residual(c).total
            if rest:
                x, c = both
                joined = sharding.constrain(jnp.concatenate([c, x], axis=1), self.mesh, "BT.")
                run = run_layers(on_one, self.single_transformer_blocks, joined, None, rest)
                c, x = jnp.split(residual(run).total, [c.shape[1]], axis=1)
                both = x, c
            return both

        return Layers(doubles + singles, part, beside=e)

    def _check(self, latents: Any, text: Any, pooled: Any, guidance: Any) -> None:
        sizes = self.sizes
        if latents.shape[-1] != sizes.channels or any(n % PATCH for n in latents.shape[1:3]):
            rule = f"it is [B, H, W, {sizes.channels}], H and W multiples of {PATCH}"
            remedy = "move the channels to the end, or crop the picture"
            raise InputError("latents", f"shape {tuple(latents.shape)}", rule, remedy)
        widths = {"text": sizes.joint_attention_dim, "pooled": sizes.pooled_projection_dim}
        for (name, width), given in zip(widths.items(), (text, pooled), strict=True):
            if given.shape[-1] != width:
                rule, remedy = f"the model takes {width} channels", "encode it for this model"
                raise InputError(name, f"shape {tuple(given.shape)}", rule, remedy)
        if (guidance is not None) != sizes.guidance_embeds:
            rule = f"the model has guidance_embeds={sizes.guidance_embeds}"
            remedy = "pass guidance, 3.5 is usual" if sizes.guidance_embeds else "leave it out"
            value = "None" if guidance is None else f"shape {tuple(guidance.shape)}"
            raise InputError("guidance", value, rule, remedy)
