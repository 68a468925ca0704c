"""The ring: the number of sends, the hops it skips, and that it gathers nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import maxattn as ma
from maxattn import masks as M
from tests.cases import draw_operands, judge_call
from tests.jaxprs import count_primitive
from tests.test_attention import array_sizes

N = 8
CONFIG = ma.AttentionConfig(
    attention="ring",
    attention_kernel="dot_product",
    ici_data_parallelism=1,
    ici_context_parallelism=N,
)


def qkv(length: int = 64, heads: int = 2) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (1, length, heads, 16)) for key in keys)


def sends(mask: M.Mask | None, length: int = 64, config: Any = CONFIG) -> tuple[int, int]:
    """Count the ppermutes of the forward, and of forward and backward together."""
    mesh, x = config.make_mesh(), qkv(length)

    def run(*x):
        return ma.attention(*x, mask=mask, config=config, mesh=mesh)

    def train(*x):
        return jax.value_and_grad(lambda *x: (run(*x) ** 2).sum(), (0, 1, 2))(*x)

    def count(f: Callable[..., Any]) -> int:
        return count_primitive(jax.make_jaxpr(f)(*x).jaxpr, "ppermute")

    return count(run), count(train)


def test_hops() -> None:
    """A full ring sends K and V n-1 times in each pass, and their gradients n times.

    Under a window of two shards a device needs its own keys and those of the previous one.
    """
    assert sends(None) == (2 * (N - 1), 2 * (N - 1) + 2 * (N - 1) + 2 * N)
    assert sends(M.BlockSlidingWindow(8, 2)) == (2, 2 + 2 + 4)
    assert sends(M.BlockSlidingWindow(8, 1)) == (0, 0)


def test_it_gathers_nothing_and_makes_no_square() -> None:
    mesh, length = CONFIG.make_mesh(), 4096
    x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
    blockwise = CONFIG.replace(attention_kernel="dot_product", use_memory_efficient_attention=True)

    def loss(*x):
        return ma.attention(*x, config=blockwise, mesh=mesh).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x)
    assert "all_gather" not in str(jaxpr)
    assert max(array_sizes(jaxpr)) < length * length // N


def test_a_whole_shard_masked_and_rows_with_nothing() -> None:
    """Keys 8 to 15 are one device's whole shard; batch row 1 has no key at all."""
    config = CONFIG.replace(ici_context_parallelism=4)
    flags, x = np.ones((2, 32), bool), draw_operands(2, 32, 32, 2, 2, 16)
    flags[0, 8:16] = flags[1] = False
    mask, mesh = M.KeyPadding(flags), config.make_mesh(jax.devices()[:4])
    x["dlse"][1] = 0.0  # of an LSE of -inf
    judge_call(partial(ma.attention, mask=mask, config=config, mesh=mesh, return_lse=True), x, mask)
