"""`attention_fn`: maxattn as the attention function of `nnx.MultiHeadAttention`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jaxtyping import Array, Float, Num

from maxattn import masks
from maxattn._attention import attention
from maxattn.config import AttentionConfig
from maxattn.config.arguments import answers_names
from maxattn.config.asked import checked_config
from maxattn.errors import InputError, Unsupported
from maxattn.modules import checks
from maxattn.modules.mha_rope import Rope, check_rope, fold, turn

log = logging.getLogger("maxattn")


@answers_names
def attention_fn(
    config: AttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    *,
    role: Literal["self", "cross"] = "self",
    rope: Rope | None = None,
) -> AttentionFn:
    """Make an attention function for `nnx.MultiHeadAttention(attention_fn=...)`.

    Args:
        config: kernel and parallelism; default `AttentionConfig()`.
        mesh: device mesh that the call is sharded over; default none.
        role: which setting of the config chooses the kernel: `attention` for "self" (default), or
            `cross_attention` for "cross".
        rope: rotates queries and keys first, as in `nnx.dot_product_attention_with_rope`: an
            `nnx.RoPE` of flax >= 0.12.12, or any function of heads [..., T, H] and positions [T]
            or None. Default none.

    Returns:
        A function with the arguments of `flax.nnx.dot_product_attention` and `input_positions`.
        Functions with equal settings are equal.

    Raises:
        ConfigError, MeshError, InputError: if `config`, `mesh`, `role` or `rope` has the
            wrong type.

    >>> attend = ma.attention_fn(ma.AttentionConfig(attention="dot_product"))
    >>> layer = nnx.MultiHeadAttention(4, 64, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 10, 64))).shape
    (1, 10, 64)
    """
    checked_config(config)
    checks.mesh(mesh)
    checks.role(role)
    check_rope(rope)
    return AttentionFn(config, mesh, role, rope)


@dataclass(frozen=True)
class AttentionFn:
    """An attention function for `nnx.MultiHeadAttention`, as `attention_fn` makes it.

    It is a hashable value: modules with equal functions share a trace.

    Args:
        config, mesh, role, rope: as in `attention_fn`.
    """

    config: AttentionConfig | None
    mesh: jax.sharding.Mesh | None
    role: Literal["self", "cross"]
    rope: Rope | None = None

    @answers_names
    def __call__(
        self,
        query: Float[Array, "*b T N H"],
        key: Float[Array, "*b S K H"],
        value: Float[Array, "*b S K H"],
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | linen.Module | None = None,
        is_causal: bool = False,
        input_positions: Num[Array, "*b T"] | None = None,
        *,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Float[Array, "*b T N H"]:
        """Attend over any number of batch axes.

        Args:
            query: [..., T, N, H].
            key, value: [..., S, K, H], where K divides N.
            bias: added to the scores; broadcasts to [..., N, T, S].
            mask: nonzero where a pair may attend; broadcasts to [..., N, T, S].
            dropout_rate: share of probabilities to drop; above 0, refused unless deterministic.
            broadcast_dropout, dropout_rng: ignored, since no probability is dropped.
            deterministic: whether dropout is off.
            dtype: computation dtype; default the operands' common dtype.
            precision: matmul precision if `module` is given; kernels always multiply float32 in
                full precision.
            module: module of NNX or Linen that stores the probabilities as `attention_weights`;
                default none. If given, attention is computed densely, with a warning.
            is_causal: if True, query i sees the keys 0 to i, as in `jax.nn.dot_product_attention`;
                a single query is one new token, which sees the whole cache.
            input_positions: positions of the tokens for the rope, [T] or broadcasting to [..., T];
                default 0, 1, 2, ... They need a rope, and T = S.
            force_fp32_for_softmax: whether stored probabilities are float32, as in Linen; default
                False. Every softmax is computed in float32.
            qk_attn_weights_einsum, attn_weights_value_einsum: Linen's own products; refused.

        Raises:
            Unsupported: if probabilities would be dropped, or a product is another's.
            InputError: if shapes or dtypes of the operands do not match.
        """
        if not deterministic and dropout_rate > 0.0:
            rule = "no kernel of maxattn drops attention probabilities"
            off = "set dropout_rate=0.0 (drop the module's output instead), or deterministic=True"
            raise Unsupported("dropout_rate", dropout_rate, rule, off)
        _refuse_product("qk_attn_weights_einsum", qk_attn_weights_einsum)
        _refuse_product("attn_weights_value_einsum", attn_weights_value_einsum)
        batch = _batch_dims(query, key, value)
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        q, k = turn(self.rope, input_positions, q, k, batch)
        dtype = jnp.result_type(q, k, v) if dtype is None else dtype
        checks.computation_dtype(dtype)
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        where = _mask(mask, is_causal, q.shape[1], batch)
        bias = None if bias is None else fold(bias, batch, "bias")
        if module is not None:
            sown = jnp.float32 if force_fp32_for_softmax else dtype
            out = _dense_and_sow(q, k, v, bias, where, batch, precision, module, sown)
        else:
            out = attention(
                q, k, v, mask=where, bias=bias, config=self.config, mesh=self.mesh, role=self.role
            )
        return out.reshape(*batch, *out.shape[1:])


def _batch_dims(q: Array, k: Array, v: Array) -> tuple[int, ...]:
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < 3 or x.shape[:-3] != q.shape[:-3]:
            axes = f"the batch axes of the query, {q.shape[:-3]}"
            rule = f"it must be [..., length, heads, channels], with {axes}"
            remedy = "give query, key and value the same batch axes"
            raise InputError(name, f"shape {tuple(x.shape)}", rule, remedy)
    return tuple(q.shape[:-3])


def _refuse_product(name: str, product: Any) -> None:
    if product is not None:
        rule = "kernels compute the products of attention themselves"
        remedy = f"leave {name}_cls out, or keep nn.dot_product_attention in this module"
        raise Unsupported(name, "given", rule, remedy)


def _mask(
    mask: Array | None, is_causal: bool, queries: int, batch: tuple[int, ...]
) -> masks.Mask | None:
    parts: list[masks.Mask] = [masks.Causal(0 if queries > 1 else None)] if is_causal else []
    if mask is not None:
        parts.append(masks.Dense(fold(jnp.asarray(mask).astype(bool), batch, "mask")))
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]


# ---- attention probabilities, on request ---------------------------------------------------------


def _dense_and_sow(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: masks.Mask | None,
    batch: tuple[int, ...],
    precision: Any,
    module: nnx.Module | linen.Module,
    sown: Any,
) -> Array:
    """Attend with a float32 softmax and sow the probabilities: 0 for queries without keys."""
    t, s, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    _say_dense(t, s)
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    how: dict[str, Any] = {"precision": precision, "preferred_element_type": jnp.float32}
    # [B, T, N, H], [B, S, N, H] -> [B, N, T, S]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, **how) * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    if mask is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        allowed = mask.bind(t, s).allowed(jnp.arange(t), jnp.arange(s))
        scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
        weights = jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0.0)
    collection: Any = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
    shown = weights.astype(sown).reshape(*batch, *weights.shape[1:])
    module.sow(collection, "attention_weights", shown)
    weights = weights.astype(q.dtype)
    # [B, N, T, S], [B, S, N, H] -> [B, T, N, H]
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision=precision)


@cache
def _say_dense(q_len: int, kv_len: int) -> None:
    if jax.process_index() == 0:
        dense = "sow_weights: attention is computed densely, with %d x %d scores per head"
        log.warning(f"{dense}, and not by the kernel of the config", q_len, kv_len)
