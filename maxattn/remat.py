"""Rematerialisation: which values of the forward pass are kept for the backward, by the names of the config.

attention names its own output and log-sum-exp ("attn_out", "attn_lse"); the modules name their projections
("query_proj", "key_proj", "value_proj") and the merged heads ("attn_output").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from flax import nnx

from maxattn.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from maxattn.config import AttentionConfig

F = TypeVar("F", bound=Callable[..., Any])
Policy = Callable[..., Any]

POLICIES = ("NONE", "FULL", "SAVE_ATTENTION", "MATMUL_WITHOUT_BATCH", "OFFLOAD_MATMUL_WITHOUT_BATCH")


def remat_policy(name: str) -> Policy | None:
    """Return the checkpoint policy of a `remat_policy` setting.

    Args:
        name: NONE: keep everything, there is no policy. FULL: keep nothing, recompute the layer.
            SAVE_ATTENTION: keep the attention's output and log-sum-exp, so that no attention is recomputed.
            MATMUL_WITHOUT_BATCH: keep the results of the projections. OFFLOAD_MATMUL_WITHOUT_BATCH: keep them in
            the host's pinned memory.

    Raises:
        ConfigError: for an unknown name.
    """
    policies = jax.checkpoint_policies
    match name:
        case "NONE":
            return None
        case "FULL":
            return policies.nothing_saveable
        case "SAVE_ATTENTION":
            return policies.save_only_these_names("attn_out", "attn_lse")
        case "MATMUL_WITHOUT_BATCH":
            return policies.dots_with_no_batch_dims_saveable
        case "OFFLOAD_MATMUL_WITHOUT_BATCH":
            return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    raise ConfigError(
        "remat_policy", name, f"it is one of {', '.join(POLICIES)}", did_you_mean(str(name), POLICIES) or "use NONE"
    )


def remat(f: F, config: AttentionConfig | None = None, *, static_argnums: int | tuple[int, ...] = ()) -> F:
    """Wrap a layer's call so that its backward recomputes what `config.remat_policy` does not keep.

    Args:
        f: a function of (module, arrays...), or an unbound method such as `Block.__call__`.
        config: its `remat_policy` decides; None, or NONE, returns `f` as it is.
        static_argnums: positions of arguments that are plain Python values, counting the module as 0.

    Returns:
        A function of the same arguments.
    """
    policy = remat_policy("NONE" if config is None else config.remat_policy)
    return f if policy is None else nnx.remat(f, policy=policy, static_argnums=static_argnums)
