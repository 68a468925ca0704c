"""Modules in jax modes without promotion of ranks or dtypes, and in 64-bit mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from tests.reference import error
from tests.waiting import but

T, HEADS, WIDTH, TEXT = 16, 4, 8, 7
SIZES: Any = {"heads": HEADS, "dim_head": WIDTH}
X = np.random.default_rng(0).normal(size=(2, T, 32)).astype("f")
WORDS = np.random.default_rng(1).normal(size=(2, TEXT, 24)).astype("f")
TABLE = ma.rope_1d(WIDTH, T)
COS, SIN = np.asarray(TABLE.cos), np.asarray(TABLE.sin)
TABLES: dict[str, tuple[str | None, Any]] = {
    "none": ("rms_norm_across_heads", None),
    "interleaved": (None, TABLE),
    "half": ("layer_norm", ma.Rotary(TABLE.cos, TABLE.sin, style="half")),
    "part of the head dim": (None, ma.Rotary(COS[:, :2], SIN[:, :2], partial=True)),
    "pair": (None, (np.repeat(COS, 2, 1), np.repeat(SIN, 2, 1))),
    "batch rows": (
        "rms_norm_across_heads", ma.Rotary(np.stack([COS] * 2), np.stack([SIN] * 2))
    ),
    "heads": (
        "layer_norm",
        ma.Rotary(np.stack([COS] * HEADS, 1)[None], np.stack([SIN] * HEADS, 1)[None]),
    ),
}  # fmt: skip


def attn(**how: Any) -> ma.FlaxAttention:
    return ma.FlaxAttention(32, **SIZES, rngs=nnx.Rngs(0), **how)


def cross() -> jax.Array:
    module = ma.CrossAttention(32, cross_attention_dim=24, **SIZES, rngs=nnx.Rngs(0))
    text = jnp.asarray(WORDS)
    return module(jnp.asarray(X), text) + module(jnp.asarray(X), kv=module.compute_kv(text))


def joint() -> Any:
    module = ma.JointAttention(32, added_kv_proj_dim=24, **SIZES, rngs=nnx.Rngs(0))
    return module(jnp.asarray(X), jnp.asarray(WORDS), rotary_emb=ma.rope_1d(WIDTH, T + TEXT))


def stream(positions: str, per_layer: bool) -> list[jax.Array]:
    """Run four blocks of a stream, and one of another stream with two batch rows."""
    module, made = attn(), []
    sizes: Any = {"layers": 1, "batch": 1, "kv_heads": HEADS, "dim_head": WIDTH, "dtype": "float32"}
    cache = ma.Stream(tokens_per_frame=4, window=3).cache(
        **sizes, positions=positions, per_layer=per_layer
    )
    table = ma.rope_1d(WIDTH, 4 if positions == "absolute" else 12)
    for block in range(4):
        own = jnp.asarray(X[:1, 4 * block : 4 * block + 4])
        y, cache = module(own, cache=cache.layer(0), rotary_emb=table)
        cache = cache.advance()
        made.append(y)
    both = ma.KVCache.stacked([cache, cache])
    return [*made, module(jnp.asarray(X[:, :4]), cache=both.layer(0), rotary_emb=table)[0]]


def over_devices(strategy: str) -> jax.Array:
    config = ma.AttentionConfig(context_parallel=strategy, ici_context_parallelism=4)
    mesh = config.make_mesh(jax.devices()[:4])
    bias, mask = jnp.asarray(X[0, :, :T])[None, None], ma.masks.BlockCausal(4)
    module = attn(config=config, mesh=mesh)
    return jax.grad(lambda x: module(x, mask=mask, bias=bias).sum())(jnp.asarray(X))


def swapped() -> jax.Array:
    model = nnx.MultiHeadAttention(HEADS, 32, rngs=nnx.Rngs(0), decode=False)
    ma.swap(model)
    return model(jnp.asarray(X))


CASES: dict[str, Callable[[], Any]] = {
    **{
        name: lambda how=how: attn(qk_norm=how[0])(jnp.asarray(X), rotary_emb=how[1])
        for name, how in TABLES.items()
    },
    "cross": cross,
    "joint": joint,
    "stream": lambda: stream("absolute", per_layer=False),
    "stream of layers apart": lambda: stream("slots", per_layer=True),
    "ring": lambda: over_devices("ring"),
    "all_gather": lambda: over_devices("all_gather"),
    "ulysses": lambda: over_devices("ulysses"),
    "swapped": swapped,
}
QUICK = ["interleaved", "heads", "cross", "joint", "stream"]


@pytest.mark.parametrize("case", but(CASES, QUICK))
def test_modules_promote_no_rank_and_no_dtype(case: str) -> None:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(CASES[case])


# Streams are drawn in 64-bit mode by tests/streaming, and tests/context_parallel has Ulysses.
@pytest.mark.parametrize("case", but(CASES, ["pair"]))
def test_64_bit_mode_changes_nothing(case: str) -> None:
    want = jax.tree.leaves(jax.jit(CASES[case])())
    with jax.enable_x64(True):
        got = jax.tree.leaves(jax.jit(CASES[case])())
    assert all(x.dtype == jnp.float32 for x in got)
    assert all(error(x, y) < 1e-5 for x, y in zip(got, want, strict=True))
