"""Flux's single block: one sequence of text and picture, attention and feed-forward side by side.

    (shift, scale, gate) = linear(silu(e));  y = norm(x) * (1 + scale) + shift
    x += gate * proj_out([attention(y), gelu(proj_mlp(y))])

Axes: B batch, T tokens of the text and then of the picture, D width. Parameter names are those of
diffusers.

Source: Flux.1, https://github.com/black-forest-labs/flux
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import sharding
from maxattn.modules import GatedBranch, ModulationRow
from maxattn_examples.common.layers import on_mesh, project_parts
from maxattn_examples.common.residual import Residual, residual

from .block import EPS, Modulation, Tokens


class FluxSingleBlock(nnx.Module):
    """Run attention and a feed-forward layer on the same tokens, and project both together.

    Args:
        dim: D.
        heads: N; a head has D / N channels.
        config: attention's settings.
        mesh: devices to spread over; default none.
        apart: True: the last projection takes attention's and the feed-forward layer's channels
            without joining them, which saves a GPU a copy. Default False.
        how: dtype and param_dtype; norms, modulation and softmax are float32 whatever they are.
        rngs: source of the initial parameters.
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
            x: text and picture, [B, T, D], with or without a branch that is to be added.
            e: embedding of time, guidance and pooled text.
            rotary: positions of the T tokens, from `positions`.
            add: False: the branch is left for the next norm to add. Default True.
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
