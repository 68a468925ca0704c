"""Where the blockwise kernel's padding and index arithmetic could show: ragged chunks, wide
integers, strict ranks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError
from tests.reference import attention64, error

RAGGED = ma.AttentionConfig(
    attention="dot_product",
    use_memory_efficient_attention=True,
    query_chunk_size=16,
    key_chunk_size=8,
)
DENSE = ma.AttentionConfig(attention="dot_product")


def qkv(t: int = 37, s: int = 41) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(2), 3)
    shapes = ((2, t, 4, 16), (2, s, 2, 16), (2, s, 2, 16))
    return tuple(
        jax.random.normal(key, shape, "float32") for key, shape in zip(keys, shapes, strict=True)
    )


def gradients(config: ma.AttentionConfig, bias: Any, mask: Any = None) -> tuple[jax.Array, ...]:
    def loss(q, k, v, bias):
        return ma.attention(q, k, v, mask=mask, bias=bias, config=config).sum()

    return jax.grad(loss, (0, 1, 2, 3))(*qkv(), bias)


@pytest.mark.parametrize("level", [-200.0, 200.0])
def test_a_large_bias_of_keys_does_not_overflow_in_the_rows_that_fill_the_last_chunk(
    level: float,
) -> None:
    bias = jnp.full((1, 1, 1, 41), level)
    want = attention64(*qkv(), bias=bias, dout=np.ones((2, 37, 4, 16)))
    for got, exact in zip(gradients(RAGGED, bias), (want.dq, want.dk, want.dv), strict=False):
        assert error(got, exact) < 1e-3  # float32 keeps 1e-5 of a score at 200


@pytest.mark.parametrize("config", [DENSE, RAGGED], ids=["dense", "blockwise"])
def test_64_bit_indexes_and_ids_change_nothing(config: ma.AttentionConfig) -> None:
    bias = jax.random.normal(jax.random.key(3), (2, 1, 37, 41))
    mask = M.Causal() & M.KeyPadding(np.array([41, 9], np.int64))
    want = gradients(config, bias, mask)
    with jax.enable_x64(True):
        got = gradients(config, bias, mask)
    assert all(error(g, w) < 1e-5 for g, w in zip(got, want, strict=True))
    assert all(g.dtype == jnp.float32 for g in got)


@pytest.mark.parametrize("config", [DENSE, RAGGED], ids=["dense", "blockwise"])
def test_where_promotion_is_forbidden(config: ma.AttentionConfig) -> None:
    mesh = ma.AttentionConfig(ici_data_parallelism=2, ici_context_parallelism=4).make_mesh()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        out = jax.jit(lambda *x: ma.attention(*x, mask=M.Causal(), config=config, mesh=mesh))(
            *qkv()
        )
    assert jnp.allclose(out, ma.attention(*qkv(), mask=M.Causal(), config=config), atol=1e-5)


@pytest.mark.parametrize("kernel", ["flash", "tokamax_flash"])
@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (1, None)])
def test_vmap_over_no_example_is_refused(axes, kernel: str) -> None:
    """Under jit too, and where something is differentiated; plain JAX gives an empty result."""

    def run(attention: str, differentiate: bool):
        config = ma.AttentionConfig(attention=attention)

        def call(q, k):
            out = ma.attention(q, k, k, mask=M.Causal(), config=config)
            return out.astype(jnp.float32).sum() if differentiate else out

        one = jax.grad(call, (0, 1)) if differentiate else call
        x = [jnp.ones((1, 16, 2, 16)) for _ in axes]
        none = [
            y if a is None else jnp.stack([y] * 2, a).take(jnp.array([], int), a)
            for y, a in zip(x, axes, strict=True)
        ]
        return jax.vmap(jax.jit(one), in_axes=axes)(*none)

    for differentiate in (False, True):
        with pytest.raises(InputError, match=f"(?s)size 0.*{kernel} runs on one example or more"):
            run(kernel, differentiate)
        assert all(x.shape[0] == 0 for x in jax.tree.leaves(run("dot_product", differentiate)))
