"""Remat policies: all give the same gradients, and saved values are not recomputed."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn._remat import POLICIES, remat, remat_policy
from maxattn.config import AttentionConfig
from maxattn.errors import ConfigError, MaxattnError
from maxattn.modules import FlaxAttention
from tests.golden_text import check_refused
from tests.jaxprs import equations

T = 24
X = jax.random.normal(jax.random.key(0), (2, T, 16))


class Block(nnx.Module):
    """Attention, then a projection, which needs its output."""

    def __init__(self, config: AttentionConfig) -> None:
        self.attn = FlaxAttention(
            16, heads=2, dim_head=8, config=config, qk_norm="rms_norm", rngs=nnx.Rngs(0)
        )
        self.up = nnx.Linear(16, 16, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array, causal: bool = False) -> jax.Array:
        mask = jnp.tril(jnp.ones((T, T), bool)) if causal else None
        return x + jnp.tanh(self.up(self.attn(x, mask=mask)))


def made(policy: str) -> tuple[Block, Any]:
    config = AttentionConfig(attention="dot_product", remat_policy=policy)  # type: ignore[arg-type]
    block = Block(config)

    def loss(block: Block, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(remat(Block.__call__, config)(block, x)))

    return block, loss


def count(policy: str) -> tuple[int, int]:
    """Count exponentials of scores, and matmuls without batch axes, in forward and backward."""
    block, loss = made(policy)
    graphdef, state = nnx.split(block)
    grad = jax.grad(lambda s, x: loss(nnx.merge(graphdef, s), x), argnums=(0, 1))
    eqns = list(equations(jax.make_jaxpr(grad)(state, X).jaxpr))
    exps, dots = ([e for e in eqns if e.primitive.name == x] for x in ("exp", "dot_general"))
    scores = [e for e in exps if e.outvars[0].aval.shape[-2:] == (T, T)]
    return len(scores), sum(not e.params["dimension_numbers"][1][0] for e in dots)


@cache
def gradients(policy: str) -> Any:
    block, loss = made(policy)
    return nnx.jit(nnx.grad(loss))(block, X)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_gradients_do_not_depend_on_the_policy(policy: str) -> None:
    same = partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(same, gradients(policy), gradients("NONE"))


def test_what_a_policy_keeps_is_not_computed_again() -> None:
    policies = ("NONE", "FULL", "SAVE_ATTENTION", "MATMUL_WITHOUT_BATCH")
    none, full, saved, matmuls = map(count, policies)
    assert none[0] == saved[0] == 2  # once forward, once from the log-sum-exp in the backward
    assert full[0] == matmuls[0] == 3  # the attention again
    assert full[1] == saved[1] > none[1] == matmuls[1]  # the projections again
    assert count("SAVE_ATTENTION_AND_MATMUL") == none


def test_none_wraps_nothing() -> None:
    assert remat(Block.__call__, None) is Block.__call__
    assert remat(Block.__call__, AttentionConfig()) is Block.__call__
    assert remat_policy("NONE") is None


WRONG: dict[str, Any] = {
    "policy_name": lambda: remat(jnp.tanh, "FULL"),  # type: ignore[arg-type]
    "text": lambda: remat(jnp.tanh, "all"),  # type: ignore[arg-type]
    "dict": lambda: remat(jnp.tanh, {"remat_policy": "FULL"}),  # type: ignore[arg-type]
    "no_function": lambda: remat("FULL", AttentionConfig(remat_policy="FULL")),  # type: ignore[type-var]
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_config_or_no_function_is_refused(name: str) -> None:
    check_refused(f"remat/{name}", MaxattnError, WRONG[name])


def test_plain_arguments_stay_plain_and_randomness_moves_on() -> None:
    config = AttentionConfig(remat_policy="FULL")
    block = Block(config)
    wrapped = remat(Block.__call__, config)
    want = block(X, causal=True)
    for call in (lambda b, x: wrapped(b, x, True), lambda b, x: wrapped(b, x=x, causal=True)):
        np.testing.assert_allclose(nnx.jit(call)(block, X), want, atol=1e-5)
    attn = FlaxAttention(16, heads=2, dim_head=8, dropout=0.5, rngs=nnx.Rngs(0))
    rngs, same = nnx.Rngs(dropout=1), nnx.Rngs(dropout=1)
    call = nnx.jit(
        lambda m, r: remat(FlaxAttention.__call__, config)(m, X, None, deterministic=False, rngs=r)
    )
    for _ in range(2):  # the stream advances outside the wrapper too
        got = call(attn, rngs)
        np.testing.assert_allclose(got, attn(X, deterministic=False, rngs=same), atol=1e-5)


def test_the_names_are_those_of_the_config() -> None:
    for policy in POLICIES:
        assert AttentionConfig(remat_policy=policy).remat_policy == policy  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        remat_policy("SAVE_ATTN")
    assert caught.value.setting == "remat_policy"
    assert caught.value.remedy == "did you mean 'SAVE_ATTENTION'?"
