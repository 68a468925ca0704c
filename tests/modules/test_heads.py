"""Splitting and merging heads, and attention for inputs with merged heads."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from maxattn import masks
from maxattn.modules import attention_flat, merge_heads, split_heads
from tests.modules.reference import attend

RNG = np.random.default_rng(4)


def test_a_head_is_a_run_of_neighbouring_channels() -> None:
    x = jnp.arange(12).reshape(1, 2, 6)
    heads = split_heads(x, 2)
    assert heads.tolist() == [[[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]]
    np.testing.assert_array_equal(merge_heads(heads), x)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_flat_attention_is_attention_of_split_heads(kv_heads: int | None) -> None:
    n, k, h, t = 4, kv_heads or 4, 6, 9
    q, key, v = (RNG.standard_normal((2, t, width)) for width in (n * h, k * h, k * h))
    split = q.reshape(2, t, n, h), key.reshape(2, t, k, h), v.reshape(2, t, k, h)
    want = attend(*split, allowed=np.tril(np.ones((t, t), bool)), scale=0.4).reshape(2, t, n * h)
    flat = (jnp.asarray(a, jnp.float32) for a in (q, key, v))
    got = attention_flat(*flat, heads=n, kv_heads=kv_heads, mask=masks.Causal(), scale=0.4)
    np.testing.assert_allclose(got, want, atol=2e-6)
