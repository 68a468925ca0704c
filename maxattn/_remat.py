"""Rematerialisation: which values of the forward are kept for the backward.

`attention` names its output and log-sum-exp ("attn_out", "attn_lse") inside its forward rule: with
a policy that saves both, attention is not recomputed. The modules name their projections and merged
heads as in MaxDiffusion: "query_proj", "key_proj", "value_proj", "attn_output". A policy that saves
"attn_output" without "attn_out" and "attn_lse" recomputes attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax
from flax import nnx

from maxattn.config import AttentionConfig
from maxattn.config.asked import checked_config
from maxattn.errors import ConfigError, InputError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
Policy = Callable[..., Any]
PLAIN = (bool, int, float, str, type(None))

_JAX = jax.checkpoint_policies
_MATMULS = _JAX.dots_with_no_batch_dims_saveable
_ATTENTION = _JAX.save_only_these_names("attn_out", "attn_lse")
_OFFLOAD = _JAX.offload_dot_with_no_batch_dims("device", "pinned_host")
_POLICIES: dict[str, Policy | None] = {
    "NONE": None,
    "FULL": _JAX.nothing_saveable,
    "SAVE_ATTENTION": _ATTENTION,
    "SAVE_ATTENTION_AND_MATMUL": _JAX.save_from_both_policies(_ATTENTION, _MATMULS),
    "MATMUL_WITHOUT_BATCH": _MATMULS,
    "OFFLOAD_MATMUL_WITHOUT_BATCH": _OFFLOAD,
}
POLICIES = tuple(_POLICIES)


def remat_policy(name: str) -> Policy | None:
    """Return the checkpoint policy of a `remat_policy` setting.

    Args:
        name: NONE: keep all values; the function returns None. FULL: keep nothing and recompute the
            layer. SAVE_ATTENTION: keep attention's output and log-sum-exp, so that attention is not
            recomputed. SAVE_ATTENTION_AND_MATMUL: keep the results of projections too, and
            recompute norms and activations. MATMUL_WITHOUT_BATCH: keep the results of projections,
            and recompute attention. OFFLOAD_MATMUL_WITHOUT_BATCH: like MATMUL_WITHOUT_BATCH, but
            keep the results in the host's pinned memory.

    Raises:
        ConfigError: the name is unknown.
    """
    if name in POLICIES:
        return _POLICIES[name]
    remedy = did_you_mean(str(name), POLICIES) or "use NONE"
    raise ConfigError("remat_policy", name, f"it must be one of {', '.join(POLICIES)}", remedy)


def remat(f: F, config: AttentionConfig | None = None) -> F:
    """Wrap a layer's call so that its backward recomputes values that the config does not keep.

    Args:
        f: a function of modules, arrays and plain values, such as the unbound method
            `Block.__call__`.
        config: the config whose `remat_policy` names the policy; if config is None (default) or
            the policy is NONE, `f` itself is returned.

    Returns:
        A function with the arguments of `f`; bool, int, float, str and None are not traced.

    Raises:
        InputError: `f` is not callable.
        ConfigError: `config` is no `AttentionConfig`.

    >>> layer = ma.FlaxAttention(32, heads=2, dim_head=16, rngs=nnx.Rngs(0))
    >>> config = ma.AttentionConfig(remat_policy="SAVE_ATTENTION")
    >>> call = ma.remat(ma.FlaxAttention.__call__, config)
    >>> gradients = nnx.grad(lambda layer: call(layer, jnp.ones((1, 8, 32))).sum())(layer)
    >>> gradients["to_q"]["kernel"].shape
    (32, 32)
    """
    if not callable(f):
        rule, remedy = "f must be callable", "pass a function, such as Block.__call__"
        raise InputError("f", repr(f), rule, remedy)
    _check_config(config)
    policy = remat_policy("NONE" if config is None else config.remat_policy)
    if policy is None:
        return f

    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Plain values bypass nnx.remat, which would trace them: f may branch on `deterministic`.
        traced_args = {i: a for i, a in enumerate(args) if not isinstance(a, PLAIN)}
        traced_kwargs = {k: a for k, a in kwargs.items() if not isinstance(a, PLAIN)}

        def inner(some: dict[int, Any], named: dict[str, Any]) -> Any:
            return f(*(some.get(i, a) for i, a in enumerate(args)), **(kwargs | named))

        return nnx.remat(inner, policy=policy)(traced_args, traced_kwargs)

    return call  # type: ignore[return-value]


def _check_config(config: Any) -> None:
    if isinstance(config, str):
        made = f"AttentionConfig(remat_policy={config!r})"
        remedy = f"pass {made}" if config in POLICIES else "pass an AttentionConfig"
        rule = "it must be an AttentionConfig; its remat_policy names the policy"
        raise ConfigError("config", repr(config), rule, remedy)
    checked_config(config)
