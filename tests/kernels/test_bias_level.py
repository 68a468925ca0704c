"""Query rows with a bias far from 0, such as padding written as -1e9.

The softmax, its gradients and a ring's sums stay right, whatever bias hidden keys have.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels import bias_level
from tests.cases import draw_operands
from tests.pairwise import pairwise
from tests.reference import Answer, attention64, error
from tests.waiting import but, enough

B, T, S, N, H = 2, 10, 12, 4, 8
Config = dict[str, Any]


def _padding() -> np.ndarray:
    bias = np.zeros((B, 1, 1, S))
    bias[0, ..., 5:], bias[1] = -1e9, -1e9
    return bias


# Of few shapes, so that they share their programs; SHAPES has the others.
BIASES = {
    "an example that is all padding": _padding(),
    "all keys alike": np.full((B, 1, 1, S), -1e9),
    "far above 0": np.full((B, N, T, S), 1e9),
    "rows of their own": np.full((B, N, T, S), -1e7) + np.arange(S) * 1.0,
    "one number a query": np.linspace(-1e8, 1e8, T).reshape(1, 1, T, 1),
    "a query that sees nothing": np.where(np.arange(T) == 3, -np.inf, 0.0).reshape(1, 1, T, 1),
    "below the limit": np.full((B, 1, 1, S), -4e3),
    "some keys hidden": np.broadcast_to(np.where(np.arange(S) % 3, -1e9, -np.inf), (B, 1, 1, S)),
}
CONFIGS: dict[str, Config] = {
    "dense": {"attention": "dot_product"},
    "folded": {"attention": "dot_product", "split_head_dim": False},
    "blockwise": {
        "attention": "dot_product", "use_memory_efficient_attention": True,
        "query_chunk_size": 4, "key_chunk_size": 5,
    },
    "ring": {"attention": "ring", "attention_kernel": "dot_product", "ici_context_parallelism": 4},
    "all_gather": {
        "attention": "dot_product", "context_parallel": "all_gather", "ici_context_parallelism": 2,
    },
    "ulysses": {"attention": "ulysses", "ici_context_parallelism": 4},
    "ulysses_ring": {
        "attention": "ulysses_ring", "ulysses_shards": 2, "ici_context_parallelism": 4,
    },
    "all axes": {
        "attention": "ring", "ici_fsdp_parallelism": 2, "ici_context_parallelism": 2,
        "ici_tensor_parallelism": 2,
    },
}  # fmt: skip


def attention(config: str) -> Any:
    """Return `ma.attention` with the LSE, with a config on its mesh."""
    chosen = ma.AttentionConfig(ici_data_parallelism=1, fallback="allow", **CONFIGS[config])
    sizes = chosen.ici_context_parallelism, chosen.ici_fsdp_parallelism
    devices = int(np.prod([*sizes, chosen.ici_tensor_parallelism]))
    mesh = chosen.make_mesh(jax.devices()[:devices]) if devices > 1 else None
    return jax.jit(partial(ma.attention, config=chosen, mesh=mesh, return_lse=True))


def draw(t: int, s: int, kv_heads: int) -> tuple[np.ndarray, ...]:
    """Draw q, k, v, dout and dlse."""
    return tuple(draw_operands(B, t, s, N, kv_heads, H).values())


def exact(q: Any, k: Any, v: Any, bias: Any, mask: M.Mask | None, dout: Any, dlse: Any) -> Answer:
    """Compute in float64; beside a bias of 3e38 it has no digits of a score left either."""
    t, s = q.shape[1], k.shape[1]
    bound = M.Full() if mask is None else mask.bind(t, s)
    bias = np.broadcast_to(np.asarray(bias, np.float64), (B, N, t, s))
    allowed = np.asarray(bound.allowed(np.arange(t), np.arange(s))) & np.isfinite(bias)
    top = np.where(allowed, bias, -np.inf).max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    rest, dlse = np.where(allowed, bias - top, 0.0), np.where(allowed.any(-1), dlse, 0.0)
    found = attention64(q, k, v, allowed, rest, dout=dout, dlse=dlse)
    return found._replace(lse=found.lse + top[..., 0])


@cache
def program(config: str) -> Any:
    """Make the program of output, LSE and gradients, the same for all biases of one shape."""
    f = attention(config)

    @jax.jit
    def both(mask: M.Mask | None, dout: jax.Array, dlse: jax.Array, *x: jax.Array) -> Any:
        (out, lse), pull = jax.vjp(lambda *x: f(*x[:3], mask=mask, bias=x[3]), *x)
        return out, lse, *pull((dout, jnp.where(jnp.isfinite(lse), dlse, 0.0)))

    return both


def check(config: str, bias: Any, mask: M.Mask | None = None, kv_heads: int = N) -> None:
    """Compare output, LSE and all gradients with float64."""
    q, k, v, dout, dlse = draw(S if mask is not None else T, S, kv_heads)
    bias = jnp.asarray(bias)
    out, lse, *grads, dbias = program(config)(mask, dout, dlse, q, k, v, bias)
    want = exact(q, k, v, bias, mask, dout, dlse)
    np.testing.assert_allclose(lse, want.lse, rtol=3e-7, atol=1e-5)
    pairs = zip((out, *grads), (want.out, want.dq, want.dk, want.dv), strict=True)
    errors = [error(got, its) for got, its in pairs]
    assert max(errors) < 2e-5, errors
    axes = tuple(i for i, size in enumerate(bias.shape) if size == 1)
    rounding = 200 * float(jnp.finfo(bias.dtype).eps)
    assert want.dbias is not None
    assert error(dbias, want.dbias.sum(axes, keepdims=True)) < rounding


PLAIN = ["dense", "folded", "blockwise", "ring", "all_gather"]


# Of 12 keys the last 4 are hidden, and have another level.
HIDDEN = {
    f"hidden keys at {x:g}": np.where(np.arange(S) < 8, 0.0, x) for x in (1e9, 1e5, -1e9, 3e38)
}
EACH = list(product([*BIASES, *HIDDEN], PLAIN))  # make test runs a fourth


@pytest.mark.parametrize(("bias", "config"), but(EACH, lambda case: EACH.index(case) % 4 == 0))
def test_against_float64(bias: str, config: str) -> None:
    if bias in BIASES:
        check(config, BIASES[bias].astype(np.float32))
        return
    own = np.random.default_rng(1).normal(size=(1, N, S, S)) + HIDDEN[bias]
    check(config, own.astype(np.float32), M.KeyPadding(np.array([8, 8])))


# Blockwise meets all sizes; strategies meet padding below.
LEFT = product((-1e9, -1e3, 3.4e38), CONFIGS)


@pytest.mark.parametrize(
    ("size", "config"),
    but(LEFT, lambda case: case in ((-1e9, "dense"), (-1e9, "all axes")) or case[1] == "blockwise"),
)
def test_padding_on_the_left_of_a_causal_call(size: float, config: str) -> None:
    """The first queries have no key without the large bias."""
    bias = np.where(np.arange(S) < 7, size, 0.0).astype(np.float32)
    check(config, bias.reshape(1, 1, 1, S), M.Causal())


def _far(shape: tuple[int, ...], low: float) -> np.ndarray:
    """Draw a bias that is far below 0 for half of its entries, and -inf for a few."""
    rng = np.random.default_rng(3)
    bias = rng.normal(size=shape) + np.where(rng.random(shape) < 0.5, low, 0.0)
    return np.where(rng.random(shape) < 0.1, -np.inf, bias)


IDS = np.sort(np.random.default_rng(5).integers(-1, 4, (B, S)), axis=1)
SPARSE: dict[str, M.Mask] = {
    "segments": M.Segments(IDS, IDS),
    "a window": M.LocalWindow(1, 1),
    "a table of heads": M.Dense(np.random.default_rng(6).random((B, N, S, S)) < 0.2),
    "causal & lengths": M.Causal() & M.KeyPadding(np.array([S, 3])),
    "no keys": M.KeyPadding(np.array([0, 2])),
}


SHAPES = {"pairs": (B, N, S, S), "shared": (1, 1, S, S), "keys": (B, 1, 1, S), "rows": (1, N, S, 1)}
FEW = pairwise({"config": [*CONFIGS], "shape": [*SHAPES], "mask": [*SPARSE]}, lambda case: True)


# Strategies meet two kinds of mask, as their own tests meet the others, and biases of each shape in
# test_against_float64.
MET = [
    case
    for case in FEW
    if case["config"] in PLAIN[:3] or case["mask"] in ("segments", "causal & lengths")
]


@pytest.mark.parametrize(
    "case", but(FEW, enough(MET, ("mask", "shape"))), ids=["-".join(case.values()) for case in FEW]
)
def test_rows_that_see_few_of_the_keys(case: dict[str, str]) -> None:
    bias = _far(SHAPES[case["shape"]], -1e9).astype(np.float32)
    check(case["config"], bias, SPARSE[case["mask"]], kv_heads=N // 2)


@pytest.mark.parametrize("config", ["dense", "blockwise", "ulysses_ring"])
@pytest.mark.parametrize(
    ("dtype", "low"), but([("bfloat16", -1e9), ("float16", -6e4)], [("float16", -6e4)])
)
def test_half_precision_biases_are_taken_as_they_are(dtype: str, low: float, config: str) -> None:
    check(config, jnp.asarray(_far((B, 1, S, S), low), dtype), M.LocalWindow(1, 1))


def test_mapped_biases_have_levels_of_their_own() -> None:
    q, k, v, *_ = draw(S, S, N)
    biases = jnp.asarray(_far((3, 1, 1, S, S), -1e9), jnp.float32)
    f = partial(attention("dense"), q, k, v, M.Causal())
    for got, want in zip(jax.vmap(f)(biases), zip(*map(f, biases), strict=True), strict=True):
        np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", SPARSE)
@pytest.mark.parametrize("at_once", [1, 4 * S * N, 2**24])
def test_levels_in_chunks_of_queries(mask: str, at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bias_level, "PAIRS_AT_ONCE", at_once)
    bias, bound = _far((1, N, 1, S), -1e9).astype(np.float32), SPARSE[mask].bind(S, S)
    allowed = np.asarray(bound.allowed(np.arange(S), np.arange(S)))
    top = np.where(allowed & np.isfinite(bias), bias, -np.inf).max(-1, keepdims=True)
    want = np.where(top < -128, np.where(np.isfinite(top), top, 0.0), 0.0)
    got = jax.jit(partial(bias_level.bias_level, q_len=S))(jnp.asarray(bias), bound)
    np.testing.assert_array_equal(got, want)


def test_no_square_is_made_to_find_the_levels() -> None:
    length = 2**15
    bias, ids = jnp.zeros((1, 1, 1, length)), jnp.zeros((1, length), jnp.int32)
    mask = (M.Causal() & M.Segments(ids, ids)).bind(length, length)
    compiled = jax.jit(partial(bias_level.bias_level, q_len=length)).lower(bias, mask).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < length**2 / 8  # a square of bool is 8 times as large


SECOND: dict[str, M.Mask | None] = {
    "causal": M.Causal(), "a window": M.BlockSlidingWindow(3, 2), "none": None,
}  # fmt: skip
FAR = {"heads": (1, N, 1, 1), "keys": (1, 1, 1, S), "pairs": (B, N, S, S)}


@pytest.mark.parametrize(
    ("mask", "shape"), but(product(SECOND, FAR), [*zip(SECOND, FAR, strict=True)])
)
def test_second_derivatives_of_the_dense_kernel(mask: str, shape: str) -> None:
    q, k, v, dout, _ = draw(S, S, N)
    bias, f = jnp.asarray(_far(FAR[shape], -1e9), jnp.float32), attention("dense")
    way = jnp.asarray(np.random.default_rng(4).normal(size=q.shape), jnp.float32)

    def slope(q: jax.Array) -> jax.Array:
        return jax.grad(lambda q: (f(q, k, v, SECOND[mask], bias)[0] * dout).sum())(q)

    step = 1e-4
    ends = (
        exact(np.float64(q) + e * np.float64(way), k, v, bias, SECOND[mask], dout, 0.0).dq
        for e in (step, -step)
    )
    want = np.subtract(*ends) / (2 * step)

    @jax.jit
    def both(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        over_reverse = jax.grad(lambda q: (slope(q) * way).sum())(q)
        return over_reverse, jax.jvp(slope, (q,), (way,))[1]

    assert max(error(got, want) for got in both(q)) < 2e-5
