"""Self-attention from a stream's block to its cache: checks, projections and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.errors import InputError
from maxattn.rope import Rotary, as_rotary
from maxattn.sharding import mesh_shape, usable_mesh
from maxattn.streaming import CacheLayer, KVCache
from maxattn.streaming import checks as refused
from maxattn.streaming.attend import How, Projected, attend_with_cache, turned_own

if TYPE_CHECKING:
    from maxattn.modules.self_attention import FlaxAttention


def run_with_cache(
    module: FlaxAttention,
    x: Float[Array, "B T query_dim"],
    layer: Any,
    rotary_emb: Any,
    rotary_emb_k: Any,
    mask: Any,
    bias: Any,
) -> tuple[Float[Array, "B T N H"], KVCache]:
    """Project a block, write its keys and values into the cache, and attend to it."""
    if not isinstance(layer, CacheLayer):
        remedy = "pass cache.layer(i)"
        rule = "attention reads and writes one layer of a KVCache"
        raise InputError("cache", type(layer).__name__, rule, remedy)
    if module.dim_head_v != module.dim_head:
        rule = f"beside a cache, values must have the head dim of the keys, {module.dim_head}"
        raise InputError("dim_head_v", module.dim_head_v, rule, "leave dim_head_v or cache out")
    cache, mesh = layer.cache, usable_mesh(module.mesh, x)
    refused.beside(cache, mask, bias)
    if rotary_emb_k is not None and not cache.layout.is_roped:
        rule = "with positions='slots', rotary_emb is a table of the window and rotates keys too"
        raise InputError("rotary_emb_k", "given", rule, "leave rotary_emb_k out")
    b, t, _ = x.shape
    refused.call(cache, (b, t, module.kv_heads, module.dim_head), mesh, mesh_shape(mesh))
    if cache.layout.is_roped or rotary_emb is None:
        table, angles_q = None, rotary_emb
        angles_k = rotary_emb if rotary_emb_k is None else rotary_emb_k
    else:
        table = window_table(cache, rotary_emb, module.dim_head)
        angles_q, angles_k = turned_own(cache, table), None
    rotary_q = module._check_rotary(angles_q, b, t, "rotary_emb")
    rotary_k = module._check_rotary(angles_k, b, t, "rotary_emb_k", module.kv_heads)
    block = Projected(*module._heads(x, *module._queries_and_keys(x, rotary_q, rotary_k)))
    how = How(module.scale, module.config, mesh)
    out, whole = attend_with_cache(layer, block, how, table, mask, bias)
    return module._on_mesh(out, "BTNH"), whole


def window_table(cache: KVCache, rotary: Any, dim_head: int) -> Rotary:
    """Read a rotary table of the window as [F, tokens, D]: F slots of `tokens` tokens each."""
    frames, tokens = cache.layout.frames, cache.layout.stream.tokens_per_frame
    table = as_rotary(rotary, (1, frames * tokens, 1, dim_head))
    if table.cos.ndim != 2:
        rule = "with positions='slots', all heads and batch rows share cos and sin: [S, D]"
        raise InputError("rotary_emb", f"shape {table.cos.shape}", rule, "pass arrays [S, D]")
    cos, sin = (jnp.asarray(x).reshape(frames, tokens, -1) for x in (table.cos, table.sin))
    return Rotary(cos, sin, table.style, table.partial)
