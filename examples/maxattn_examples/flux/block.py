"""Flux's blocks: double ones, with separate weights for text and picture, and single ones.

    double:  (shift1, scale1, gate1, shift2, scale2, gate2) = linear(silu(e)), for x and c each
             x', c' = joint attention of norm(x) * (1 + scale1) + shift1 and of the same of c
             x += gate1 * x';  x += gate2 * ffn(norm(x) * (1 + scale2) + shift2);  c alike
    single:  (shift, scale, gate) = linear(silu(e));  y = norm(x) * (1 + scale) + shift
             x += gate * proj_out([attention(y), gelu(proj_mlp(y))])

Axes: B batch, T tokens of the picture (in a single block: of the text, then the picture), S tokens
of the text, D width. Parameter names are those of diffusers.

Source: Flux.1, https://github.com/black-forest-labs/flux
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import rope, sharding
from maxattn.modules import GatedBranch, ModulationRow
from maxattn_examples.common.layers import (
    FeedForward,
    Residual,
    norm32,
    on_mesh,
    project_parts,
    residual,
    rows_of,
)

EPS = 1e-6
AXES = (16, 56, 56)  # channels of a head for time, row and column
Tokens = Float[Array, "B T D"]
Parts = list[ModulationRow]


class Modulation(nnx.Module):
    """A norm without parameters, and the shift, scale and gates computed from an embedding.

    Args:
        parts: number of vectors [D].
    """

    def __init__(
        self, dim: int, parts: int, mesh: Any = None, *, rngs: nnx.Rngs, **how: Any
    ) -> None:
        self.parts, self.mesh = parts, mesh
        # A quarter of Flux's parameters is here.
        where = on_mesh("fsdp", "tensor")
        self.linear = nnx.Linear(dim, parts * dim, kernel_metadata=where, rngs=rngs, **how)
        self.norm = norm32(dim, EPS, False, rngs)

    def __call__(self, e: Float[Array, "B D"]) -> Parts:
        """Return the vectors in the order of diffusers' weights."""
        table = sharding.constrain(self.linear(nnx.silu(e)), self.mesh, "B.")
        return list(rows_of(rearrange(table, "B (R D) -> B 1 R D", R=self.parts)))


class FluxBlock(nnx.Module):
    """Run joint attention and two feed-forward layers.

    Args:
        heads: N; a head has D / N channels.
        dtype: of the computation, default float32; norms, modulation and softmax are always
            float32.
    """

    diffusers_names: ClassVar[dict[str, str]] = {"ffn": "ff", "ffn_context": "ff_context"}

    def __init__(
        self,
        dim: int,
        heads: int,
        config: ma.AttentionConfig | None = None,
        mesh: jax.sharding.Mesh | None = None,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        how: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.mesh = mesh
        self.norm1, self.norm1_context = (Modulation(dim, 6, mesh, **how) for _ in range(2))
        norm: dict[str, Any] = {"bias": True, "qk_norm": "rms_norm", "eps": EPS}
        where: dict[str, Any] = {"config": config, "mesh": mesh, **how}
        self.attn = ma.JointAttention(dim, dim, heads, dim_head=dim // heads, **norm, **where)
        self.norm2, self.norm2_context = (norm32(dim, EPS, False, rngs) for _ in range(2))
        self.ffn, self.ffn_context = (FeedForward(dim, 4 * dim, **how) for _ in range(2))

    def __call__(
        self,
        x: Tokens | Residual,
        text: Tokens | Residual,
        e: Float[Array, "B D"],
        rotary: ma.Rotary,
        add: bool = True,
    ) -> tuple[Any, Any]:
        """Return the new tokens of the picture and of the text.

        Args:
            x: the picture's, [B, T, D], perhaps with a branch that is not added yet.
            text: the text's, [B, S, D], likewise.
            add: False leaves the last branches for the next norms to add. Default True.
        """
        mine, theirs = self.norm1(e), self.norm1_context(e)
        x, y = residual(x).normed(self.norm1.norm, mine[1], mine[0], self.mesh)
        context = self.norm1_context.norm, theirs[1], theirs[0], self.mesh
        text, text_y = residual(text).normed(*context)
        attended = self._attend(y, text_y, rotary, add)
        of_x = self._rest(x, attended[0], mine, self.norm2, self.ffn)
        of_text = self._rest(text, attended[1], theirs, self.norm2_context, self.ffn_context)
        if not add:
            return of_x, of_text
        whole = sharding.constrain(of_x.total, self.mesh, "BT.")
        return whole, sharding.constrain(of_text.total, self.mesh, "B..")

    def _attend(
        self, x: Tokens, text: Tokens, rotary: ma.Rotary, add: bool
    ) -> tuple[tuple[Tokens, Any], tuple[Tokens, Any]]:
        """Return the attention of picture and text, each with an output bias left to add."""
        if not add:
            return self.attn.without_out_bias(x, text, rotary)
        y, text_y = self.attn(x, text, rotary_emb=rotary)
        return (y, None), (text_y, None)

    def _rest(
        self,
        x: Tokens,
        attended: tuple[Tokens, Any],
        parts: Parts,
        norm: nnx.LayerNorm,
        ffn: FeedForward,
    ) -> Residual:
        (y, bias), (_, _, gate1, shift2, scale2, gate2) = attended, parts
        before = Residual(x, GatedBranch(y, gate1, bias))
        x, y = before.normed(norm, scale2, shift2, self.mesh)
        return Residual(x, GatedBranch(ffn(y), gate2))


class FluxSingleBlock(nnx.Module):
    """Run attention and a feed-forward layer on the same tokens, and project both together.

    Args:
        heads: N; a head has D / N channels.
        apart: True multiplies attention's and the feed-forward layer's channels by the last kernel
            without concatenating them, which saves a copy on GPUs. Default False.
        how: dtype and param_dtype; norms, modulation and softmax are always float32.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        config: ma.AttentionConfig | None = None,
        mesh: jax.sharding.Mesh | None = None,
        *,
        apart: bool = False,
        rngs: nnx.Rngs,
        **how: Any,
    ) -> None:
        self.mesh, self.apart, how = mesh, apart, {"rngs": rngs, **how}
        self.norm = Modulation(dim, 3, mesh, **how)
        norm: dict[str, Any] = {"bias": True, "qk_norm": "rms_norm", "eps": EPS}
        where: dict[str, Any] = {"config": config, "mesh": mesh, "out_proj": False, **how}
        self.attn = ma.FlaxAttention(dim, heads, dim_head=dim // heads, **norm, **where)
        inner, whole = on_mesh("fsdp", "tensor"), on_mesh("tensor", "fsdp")
        self.proj_mlp = nnx.Linear(dim, 4 * dim, kernel_metadata=inner, **how)
        self.proj_out = nnx.Linear(5 * dim, dim, kernel_metadata=whole, **how)

    def __call__(
        self,
        x: Tokens | Residual,
        e: Float[Array, "B D"],
        rotary: ma.Rotary,
        add: bool = True,
    ) -> Any:
        """Return the new tokens.

        Args:
            x: text and picture, [B, T, D], perhaps with a branch that is not added yet.
            add: False leaves the branch for the next norm to add. Default True.
        """
        shift, scale, gate = self.norm(e)
        x, y = residual(x).normed(self.norm.norm, scale, shift, self.mesh)
        attended, inner = self.attn(y, rotary_emb=rotary), nnx.gelu(self.proj_mlp(y))
        out = Residual(x, self._projected([attended, inner], gate))
        return sharding.constrain(out.total, self.mesh, "BT.") if add else out

    def _projected(self, parts: list[Tokens], gate: ModulationRow) -> GatedBranch:
        # Where the kernel's rows lie over devices, a part of them is no whole shards.
        shape = dict(sharding.mesh_shape(sharding.usable_mesh(self.mesh, parts[0])))
        if not self.apart or "tensor" in shape:
            return GatedBranch(self.proj_out(jnp.concatenate(parts, axis=-1)), gate)
        bias = self.proj_out.bias
        y = project_parts(self.proj_out, parts)
        return GatedBranch(y, gate, None if bias is None else bias[...])


def positions(
    text: int, height: int, width: int, axes: tuple[int, ...] = AXES, theta: float = 1e4
) -> ma.Rotary:
    """Make the rotary table of a joint sequence: the text's tokens at 0, then the picture's.

    Args:
        height, width: tokens of the picture; T is their product.
        axes: rotated channels of a head, for time, row and column.
    """
    grid = np.meshgrid([0], np.arange(height), np.arange(width), indexing="ij")
    picture = np.stack(grid, -1).reshape(-1, 3)
    return rope.rope_nd(axes, np.concatenate([np.zeros((text, 3)), picture]), theta)
