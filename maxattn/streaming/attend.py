"""A block's attention with a cache: what it writes, and what its queries see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from maxattn.attention import attention
from maxattn.errors import Unsupported
from maxattn.rope import Rotary, apply_rotary
from maxattn.streaming import checks
from maxattn.streaming.kv_cache import CacheLayer, KVCache
from maxattn.streaming.read import How, read, turned_own
from maxattn.streaming.write import write

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class Projected(NamedTuple):
    """Hold the queries, keys and values of a block, normed and, where keys are kept so, turned.

    Args:
        q: [B, T, N, H].
        k, v: [B, T, K, H].
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]


def attend_with_cache(
    layer: CacheLayer,
    block: Projected,
    how: How,
    table: Rotary | None = None,
    mask: Any = None,
    bias: Any = None,
) -> tuple[Float[Array, "B T N H"], KVCache]:
    """Write a block's keys and values, and attend to all that the block sees.

    Args:
        layer: of the cache.
        block: queries, keys and values.
        how: scale, config and mesh.
        table: of the window, [F, tokens, D], where keys are kept without rotary embedding.
        mask, bias: of a pass that extracts; a mask of one that reads alone too.

    Returns:
        The output and the whole cache.

    Raises:
        InputError: the cache is of another dtype.
        Unsupported: a pass that writes is differentiated.
    """
    cache = layer.cache
    checks.same_dtype(cache, block.k, block.v)
    if cache.mode == "cached":
        return read(layer, block.q, how, None, (block.k, block.v), mask), cache
    q, k, v = map(_undifferentiated, block) if cache.keeps else block
    if cache.mode == "extract":
        out = _attend(q, k, v, how, mask, bias)
        kept = slice(cache.start, cache.start + cache.tokens)
        return out, write(layer, k[:, kept], v[:, kept], how.mesh)
    if cache.stage == "empty":
        turned = k if table is None else apply_rotary(k, turned_own(cache, table))
        out = _attend(q, turned, v, how, _mask_of_prefix(cache))
        return out, write(layer, k, v, how.mesh) if cache.keeps else cache
    cache = write(layer, k, v, how.mesh)
    return read(CacheLayer(cache, layer.index), q, how, table), cache


def _attend(q: Array, k: Array, v: Array, how: How, mask: Any = None, bias: Any = None) -> Array:
    return attention(q, k, v, mask, bias, how.scale, how.config, how.mesh)


def _mask_of_prefix(cache: KVCache) -> Any:
    """Let the first block see itself; blocks of a prefix see what the stream says."""
    stream = cache.layout.stream
    return None if cache.own == stream.first_block else stream.mask(cache.own)


@jax.custom_jvp
def _undifferentiated(x: Array) -> Array:
    return x


@_undifferentiated.defjvp
def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    rule = "a gradient through what is written would keep a copy of the cache for every block"
    teacher = "run the blocks without gradient, then one forward with stream.teacher_mask over them"
    reading = "cache.cached() is read under a gradient"
    raise Unsupported("cache", "under a gradient", rule, f"{teacher}; {reading}")
