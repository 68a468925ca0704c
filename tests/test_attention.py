"""Guarantees of `attention()` beside its numbers: no retrace, no T x S array, remat, transforms."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.blockwise.visits import visits
from tests.kernel_of import memory_efficient

BLOCKWISE = ma.AttentionConfig(attention="dot_product", use_memory_efficient_attention=True)
DENSE = ma.AttentionConfig(attention="dot_product")


def qkv(t: int = 40, batch: int = 2) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(1), 3)
    return tuple(
        jax.random.normal(k, (batch, t, n, 16)) for k, n in zip(keys, (4, 2, 2), strict=True)
    )


def array_sizes(jaxpr) -> set[int]:
    """Collect the sizes of all arrays in a jaxpr and everything nested in it."""
    text = str(jaxpr)
    found = re.findall(r"\b(?:f32|bf16|f16|bool|i32|s32|i8|u8)\[([\d,]+)\]", text)
    return {int(np.prod([int(d) for d in dims.split(",")])) for dims in found}


# ---- memory --------------------------------------------------------------------------------------


def test_block_window_makes_no_square_array_and_visits_the_window_alone() -> None:
    t, block, window = 32_760, 1560, 7
    mask = M.BlockSlidingWindow(block, window)
    x = jax.ShapeDtypeStruct((1, t, 1, 16), jnp.float32)

    def loss(q, k, v):
        return ma.attention(q, k, v, mask=mask, config=BLOCKWISE).sum()

    largest = max(array_sizes(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x)))
    assert largest <= 2**21  # of 1 Gi pairs
    kernel = memory_efficient(ma.plan(ma.Call.of(x, x, mask=mask), BLOCKWISE).kernel)
    bound = mask.bind(t, t)
    lists = visits(bound, kernel.query_chunk, kernel.key_chunk, t, t)
    # Chunks line up with the frames, so nothing else is computed.
    visited = int(lists.count.sum()) * kernel.query_chunk * kernel.key_chunk
    assert visited == bound.allowed_pairs(t, t)
    assert not lists.mixed[np.arange(lists.index.shape[1]) < lists.count[:, None]].any()


@pytest.mark.parametrize("backward", [False, True])
def test_blockwise_memory_is_a_twentieth_of_dense(backward: bool) -> None:
    x = jax.ShapeDtypeStruct((1, 16_384, 4, 64), jnp.float32)

    def peak(config: ma.AttentionConfig) -> int:
        def run(q, k, v):
            return ma.attention(q, k, v, config=config)

        def run_back(q, k, v, dout):
            return jax.vjp(run, q, k, v)[1](dout)

        step, operands = (run_back, (x,) * 4) if backward else (run, (x,) * 3)
        m = jax.jit(step).lower(*operands).compile().memory_analysis()
        assert m is not None
        return m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes

    assert peak(BLOCKWISE) * 20 <= peak(DENSE)


# ---- tracing -------------------------------------------------------------------------------------


def test_a_second_call_traces_nothing(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv(t=41)
    lengths = jnp.array([41, 20])
    ma.attention(q, k, v, mask=M.KeyPadding(lengths))
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        ma.attention(q + 1, k, v, mask=M.KeyPadding(lengths - 3))
    assert not [r for r in caplog.records if "_run" in r.getMessage()]
    assert caplog.records, "what is added to q is compiled"


# ---- semantics that kernels share ----------------------------------------------------------------


@pytest.mark.parametrize("config", [DENSE, BLOCKWISE], ids=["dense", "blockwise"])
def test_rows_with_nothing_to_attend_to(config: ma.AttentionConfig) -> None:
    q, k, v = qkv()
    mask = M.KeyPadding(jnp.array([40, 0]))

    def f(q, k, v):
        return ma.attention(q, k, v, mask=mask, config=config, return_lse=True)

    (out, lse), vjp = jax.vjp(f, q, k, v)
    assert (out[1] == 0).all()
    assert (lse[1] == -jnp.inf).all()
    # Whatever comes back for such a row, even NaN and infinity, it has no gradient.
    dout = jnp.ones_like(out).at[1].set(jnp.nan)
    dlse = jnp.zeros_like(lse).at[1].set(jnp.inf)
    dq, dk, dv = vjp((dout, dlse))
    assert all((g[1] == 0).all() and jnp.isfinite(g).all() for g in (dq, dk, dv))


def test_mask_padding_tokens_false_attends_to_the_callers_padding_alone() -> None:
    q, k, v = qkv()
    off = DENSE.replace(mask_padding_tokens=False)
    padding, beyond = M.KeyPadding(jnp.array([40, 9])), ~M.KeyPadding(np.array([5, 9]))
    for given, kept in ((padding & M.Causal(), M.Causal()), (beyond, beyond)):
        got, want = (ma.attention(q, k, v, m, config=c) for m, c in ((given, off), (kept, DENSE)))
        assert jnp.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 40), (1, 1, 40, 40), (2, 1, 1, 40), (2, 4, 40, 40)])
def test_boolean_arrays_are_masks(shape: tuple[int, ...]) -> None:
    q, k, v = qkv()
    table = jax.random.bernoulli(jax.random.key(3), 0.6, shape).at[..., 0].set(True)
    got = ma.attention(q, k, v, mask=table)
    assert jnp.allclose(got, ma.attention(q, k, v, bias=jnp.where(table, 0.0, -1e30)), atol=1e-5)
