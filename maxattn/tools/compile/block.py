"""A transformer block as Wan has it, to compile: what a step runs once a layer.

x += gate1 * self_attention(norm(x) * (1 + scale1) + shift1)
x += cross_attention(norm(x), text)
x += gate2 * ffn(norm(x) * (1 + scale2) + shift2)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn.modules import CrossAttention, FlaxAttention
from maxattn.remat import remat
from maxattn.rope import Rotary
from maxattn.sharding import constrain, on_axes
from maxattn.tools.compile.job import CompileJob

TEXT = 512  # tokens of the text
PARTS = 6  # vectors of the modulation: shift, scale and gate of two layers
Tokens = Float[Array, "B T D"]


class TransformerBlock(nnx.Module):
    """Attend to itself and to a text, then feed forward; modulated by a time.

    Args:
        job: its shape, config and the width of the feed-forward.
        mesh: devices.
    """

    def __init__(self, job: CompileJob, mesh: Any) -> None:
        call = job.shape.call()
        width = call.heads * call.head_dim
        how: dict[str, Any] = {"dtype": call.dtype, "rngs": nnx.Rngs(0)}
        attention = attention_settings(job, mesh)
        self.mesh = mesh
        self.attention = FlaxAttention(width, **attention)
        self.cross = CrossAttention(width, **attention)
        up, down = on_axes("fsdp", "tensor"), on_axes("tensor", "fsdp")
        self.up = nnx.Linear(width, job.block, kernel_metadata=up, **how)
        self.down = nnx.Linear(job.block, width, kernel_metadata=down, **how)
        plain = {"use_bias": False, "use_scale": False, "dtype": jnp.float32}
        self.norms = nnx.List([nnx.LayerNorm(width, **plain, rngs=nnx.Rngs(0)) for _ in range(3)])

    def __call__(
        self, x: Tokens, text: Tokens, modulation: Float[Array, "6 D"], rotary: Rotary
    ) -> Tokens:
        """Run the three layers."""
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        first, second, third = self.norms
        h = self.attention(_modulated(first, x, scale1, shift1), rotary_emb=rotary)
        x = x + (gate1 * h).astype(x.dtype)
        x = x + self.cross(second(x).astype(x.dtype), text)
        h = self.down(jax.nn.gelu(self.up(_modulated(third, x, scale2, shift2))))
        return constrain(x + (gate2 * h).astype(x.dtype), self.mesh, "BT.")


def attention_settings(job: CompileJob, mesh: Any) -> dict[str, Any]:
    """Return the settings of an attention as Wan has it, beside its width."""
    call = job.shape.call()
    heads = {"heads": call.heads, "kv_heads": call.kv_heads, "dim_head": call.head_dim}
    norm = {"bias": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6}
    where = {"config": job.config, "mesh": mesh, "dtype": call.dtype}
    return heads | norm | where | {"rngs": nnx.Rngs(0)}


def run_block(block: TransformerBlock, job: CompileJob, *operands: Any) -> Any:
    """Run a block, which keeps for its backward what the config's `remat_policy` says."""
    return remat(TransformerBlock.__call__, job.config)(block, *operands)


def _modulated(norm: nnx.LayerNorm, x: Tokens, scale: Array, shift: Array) -> Tokens:
    return (norm(x) * (1 + scale) + shift).astype(x.dtype)
