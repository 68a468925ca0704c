"""The ring: the number of sends, the hops it skips, and that it gathers nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.context_parallel.ring import head_halves
from maxattn.context_parallel.ring.ring import Ring
from maxattn.kernels.dot_product import DotProduct
from tests.jaxprs import count_primitive
from tests.reference import attention64
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


@pytest.mark.parametrize(
    "mask", [None, M.Causal(), M.BlockSlidingWindow(8, 3), M.LocalWindow(4, 4)]
)
@pytest.mark.parametrize(("length", "direction"), [(64, "one_way"), (61, "both_ways")])
def test_the_plan_names_every_send(mask: M.Mask | None, length: int, direction: str) -> None:
    x, config = qkv(length), CONFIG.replace(ring_direction=direction)
    plan = ma.plan(ma.Call.of(x[0], x[1], mask=mask), config, config.make_mesh())
    assert ("both ways" in plan.strategy.label()) == (direction == "both_ways")
    named = {"forward": 0, "backward": 0}
    for c in plan.collectives:
        assert c.kind == "ppermute"
        named[c.when] += c.hops * c.arrays
    forward, both = sends(mask, length, config)
    assert (named["forward"], named["forward"] + named["backward"]) == (forward, both)


@pytest.mark.parametrize(
    ("heads", "mask", "last"),
    [
        pytest.param(4, None, True, marks=pytest.mark.slow),
        (2, None, False),
        (4, M.BlockSlidingWindow(8, 2), True),
        (4, M.BlockSlidingWindow(8, 1), False),
    ],
)
def test_own_keys_are_computed_before_the_others_and_after_them(
    heads: int, mask: M.Mask | None, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the heads runs beside the last transfer; the heads are whole if nothing is sent."""
    order, backward = [], head_halves.backward

    def noted(kernel, part, *x):
        order.append(part)
        return backward(kernel, part, *x)

    monkeypatch.setattr(head_halves, "backward", noted)
    jax.clear_caches()
    run = partial(ma.attention, mask=mask, config=CONFIG, mesh=CONFIG.make_mesh())
    jax.make_jaxpr(jax.grad(lambda *x: run(*x).sum(), (0, 1, 2)))(*qkv(heads=heads))
    hops = {None: N, M.BlockSlidingWindow(8, 2): 2, M.BlockSlidingWindow(8, 1): 1}[mask]
    others = [part for part in order if part == head_halves.ALL]
    whole = [head_halves.FIRST, *others, head_halves.SECOND] if last else others
    assert order == whole and len(others) >= hops - last


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mask", "biased", "may"),
    [
        (6, 6, M.Full(), False, False),
        (8, 2, M.Causal(), False, True),
        (8, 1, M.Full(), False, False),
        (4, 4, M.Full(), True, False),
        (4, 4, M.Dense(np.ones((1, 4, 8, 8), bool)), False, False),
    ],
)
def test_which_heads_are_halved(
    heads: int, kv_heads: int, mask: M.Mask, biased: bool, may: bool
) -> None:
    assert head_halves.may_halve(heads, kv_heads, mask, biased) == may


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
    mesh, x = config.make_mesh(jax.devices()[:4]), qkv(32)
    q, k, v = (jnp.concatenate([x, x]) for x in x)
    flags = np.ones((2, 32), bool)
    flags[0, 8:16] = False
    flags[1] = False

    attend = partial(ma.attention, config=config, mesh=mesh, return_lse=True)

    @jax.jit
    def both(*x):
        (out, lse), vjp = jax.vjp(partial(attend, mask=M.KeyPadding(flags)), *x)
        return out, lse, vjp((jnp.ones_like(out), jnp.zeros_like(lse)))

    out, lse, grads = both(q, k, v)
    want = attention64(q, k, v, flags[:, None, None], dout=np.ones(out.shape))
    np.testing.assert_allclose(out, want.out, atol=1e-5)
    assert (lse[1] == -jnp.inf).all()
    for got, expected in zip(grads, want[2:5], strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_hops_follow_the_mask() -> None:
    ring = Ring((("context", 4),)).layout
    assert ring.hops(M.Full(), 16, 16) == (0, 1, 2, 3)
    assert ring.hops(M.Causal().bind(16, 16), 16, 16) == (0, 1, 2, 3)
    assert ring.hops(M.LocalWindow(3, 0).bind(16, 16), 16, 16) == (0, 1)
    assert ring.hops(M.LocalWindow(3, 3).bind(16, 16), 16, 16) == (0, 1, 3)


def test_a_kernel_is_traced_once_a_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is traced once more for the shapes of hops in which some ranks are idle."""
    traced: list[Any] = []
    forward = DotProduct.forward
    monkeypatch.setattr(DotProduct, "forward", lambda *x: traced.append(x) or forward(*x))
    mesh, x = CONFIG.make_mesh(), qkv(72)
    run = partial(ma.attention, mask=M.Causal(), config=CONFIG, mesh=mesh)
    jax.make_jaxpr(run)(*x)
    assert len(traced) == N + 1
