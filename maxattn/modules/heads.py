"""Conversions between [B, T, N*H] and [B, T, N, H], and attention on joined heads."""

from __future__ import annotations

from typing import Any, Literal

from einops import rearrange
from jaxtyping import Array, Float

from maxattn._attention import attention
from maxattn.config.arguments import answers_names
from maxattn.errors import InputError
from maxattn.modules import checks


def split_heads(x: Float[Array, "B T NH"], heads: int) -> Float[Array, "B T N H"]:
    """Split the last axis of x into heads of neighbouring channels: [B, T, N, H].

    Args:
        x: [B, T, N*H].
        heads: number of heads N, which divides the last axis.

    Raises:
        InputError: if the heads do not divide the channels, or x does not have three axes.
    """
    checks.rank_3("x", x)
    checks.positive("heads", heads)
    if x.shape[-1] % heads:
        rule = f"it must divide the {x.shape[-1]} channels of the input"
        raise InputError("heads", heads, rule, "use a number of heads that divides them")
    return rearrange(x, "b t (n h) -> b t n h", n=heads)


def merge_heads(x: Float[Array, "B T N H"]) -> Float[Array, "B T NH"]:
    """Join heads [B, T, N, H] to [B, T, N*H], the inverse of `split_heads`."""
    return rearrange(x, "b t n h -> b t (n h)")


@answers_names
def attention_flat(
    q: Float[Array, "B T NH"],
    k: Float[Array, "B S KH"],
    v: Float[Array, "B S KH"],
    heads: int,
    kv_heads: int | None = None,
    *,
    mask: Any = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    config: Any = None,
    mesh: Any = None,
    role: Literal["self", "cross"] = "self",
) -> Float[Array, "B T NH"]:
    """Split the heads of q, k and v, attend, and merge the heads of the output.

    Args:
        q: [B, T, N*H].
        k, v: [B, S, K*H].
        heads: number of query heads, N.
        kv_heads: number of key heads, K; default N.
        mask, bias, scale, config, mesh, role: as in `maxattn.attention`.

    Returns:
        [B, T, N*H].

    Raises:
        InputError: if the heads do not divide the channels.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    split = split_heads(q, heads), split_heads(k, kv_heads), split_heads(v, kv_heads)
    return merge_heads(attention(*split, mask, bias, scale, config, mesh, role))
