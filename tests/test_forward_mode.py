"""Forward mode of dot_product, dense and memory-efficient, against jax's own on float64 code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.errors import Unsupported
from tests.waiting import but

B, T, S, N, K, H = 2, 19, 17, 4, 2, 8
MASK = ma.masks.Rectangle(0, 14, 0, 10) | ma.masks.Rectangle(5, 19, 3, 17)  # one row sees nothing
DENSE = ma.AttentionConfig(attention="dot_product")
CHUNKS = {"query_chunk_size": 8, "key_chunk_size": 4}
CONFIGS = {
    "dense": DENSE,
    "heads in one axis": DENSE.replace(split_head_dim=False),
    "memory-efficient": DENSE.replace(use_memory_efficient_attention=True, **CHUNKS),
}
Tree = Any


def draw(seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (1, N, T, S)
    return tuple(rng.normal(size=shape) for shape in shapes)


X, DX = draw(0), draw(1)


def plain(q: Any, k: Any, v: Any, bias: Any) -> Tree:
    """Return (out, lse) by jax.numpy; the LSE of a query without keys is 0."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    i, j = np.mgrid[:T, :S]
    allowed = (i < 14) & (j < 10) | (i >= 5) & (i < 19) & (j >= 3)
    seen = allowed.any(1)
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5 + bias
    s = jnp.where(seen[:, None], jnp.where(allowed, s, -jnp.inf), 0.0)
    p = jnp.where(seen[:, None], jax.nn.softmax(s, axis=-1), 0.0)
    lse = jnp.where(seen, jax.scipy.special.logsumexp(s, axis=-1), 0.0)
    return jnp.einsum("bnts,bsnh->btnh", p, v), lse


def ours(config: ma.AttentionConfig, *x: Any, mesh: Any = None) -> Tree:
    how: Any = {"mask": MASK, "config": config, "mesh": mesh, "return_lse": True}
    out, lse = ma.attention(*x[:3], bias=x[3], **how)
    return out, jnp.where(jnp.isfinite(lse), lse, 0.0)


def total(f: Callable[..., Tree]) -> Callable[..., Any]:
    return lambda *x: sum((y**2).sum() for y in jax.tree.leaves(f(*x)))


def mean_flow(f: Callable[..., Tree], x: Any, dx: Any) -> Any:
    """Return the gradient of MeanFlow's loss, whose target has a jvp, and no gradient."""

    def loss(q: Any) -> Any:
        u, du = jax.jvp(lambda q: f(q, *x[1:])[0], (q,), dx[:1])
        return ((u - jax.lax.stop_gradient(u + du)) ** 2).sum()

    return jax.grad(loss)(x[0])


def over_two(f: Callable[..., Tree], x: Any, dx: Any) -> Tree:
    """Map over queries and their tangents only."""

    def one(q: Any, dq: Any) -> Tree:
        return jax.jvp(lambda q: f(q, *x[1:]), (q,), (dq,))

    return jax.vmap(one)(jnp.stack([x[0], 2 * x[0]]), jnp.stack([dx[0], -dx[0]]))


def of_vmap(f: Callable[..., Tree], x: Any, dx: Any) -> Tree:
    def both(q: Any) -> Tree:
        return jax.vmap(lambda q: f(q, *x[1:]))(jnp.stack([q, 2 * q]))

    return jax.jvp(both, x[:1], dx[:1]), jax.grad(total(both))(x[0])


MODES: dict[str, Callable[[Callable[..., Tree], Any, Any], Tree]] = {
    "jvp": jax.jvp,
    "jvp of values": lambda f, x, dx: jax.jvp(lambda v: f(*x[:2], v, x[3]), x[2:3], dx[2:3]),
    "jvp under jit": jax.jvp,
    "linearize": lambda f, x, dx: jax.linearize(f, *x)[1](*dx),
    "jacfwd": lambda f, x, dx: jax.jacfwd(lambda s: f(x[0] * s, *x[1:])[0])(1.0),
    "grad": lambda f, x, dx: jax.grad(total(f), (0, 1, 2, 3))(*x),
    "jvp of grad": lambda f, x, dx: jax.jvp(jax.grad(total(f), (0, 1, 2, 3)), x, dx),
    "jvp of jvp": lambda f, x, dx: jax.jvp(lambda *x: jax.jvp(f, x, dx), x, dx),
    "mean flow": mean_flow,
    "vmap of jvp": over_two,
    "jvp of vmap": of_vmap,
    "jvp of remat": lambda f, x, dx: jax.jvp(jax.checkpoint(f), x, dx),
    "grad of remat": lambda f, x, dx: jax.grad(jax.checkpoint(total(f)), (0, 1))(*x),
}
EAGER = "jvp", "linearize"  # the others run under jit: one program compiles sooner than each op


def jvp_and_grad(f: Callable[..., Tree], x: Any, dx: Any) -> Tree:
    return jax.jvp(f, x, dx), jax.grad(total(f))(*x)


def grad_of_jvp(f: Callable[..., Tree], x: Any, dx: Any) -> Tree:
    return jax.grad(total(lambda *x: jax.jvp(f, x, dx)), (0, 1, 2, 3))(*x)


def close(got: Tree, want: Tree, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))


def jitted(mode: Callable[..., Tree], f: Callable[..., Tree]) -> Callable[..., Tree]:
    return jax.jit(partial(mode, f))


@cache
def exact(mode: Callable[..., Tree]) -> Tree:
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jitted(mode, plain)(X, DX))


PAIRS = [(config, mode) for config in CONFIGS for mode in MODES]
SOME = [("dense", "jvp"), ("dense", "jvp of grad"), ("dense", "mean flow")] + [
    ("memory-efficient", mode) for mode in ("jvp", "jvp of grad", "mean flow")
]


@pytest.mark.parametrize(("config", "mode"), but(PAIRS, SOME))
def test_forward_mode_is_jaxs_of_float64(config: str, mode: str) -> None:
    x, dx = jax.tree.map(partial(jnp.asarray, dtype="float32"), (X, DX))
    run = partial if mode in EAGER else jitted
    close(run(MODES[mode], partial(ours, CONFIGS[config]))(x, dx), exact(MODES[mode]))


def test_a_tangent_is_differentiated_by_dense_alone() -> None:
    x, dx = jax.tree.map(partial(jnp.asarray, dtype="float32"), (X, DX))
    close(jitted(grad_of_jvp, partial(ours, DENSE))(x, dx), exact(grad_of_jvp))
    with pytest.raises(Unsupported, match="memory_efficient computes first derivatives only"):
        jitted(grad_of_jvp, partial(ours, CONFIGS["memory-efficient"]))(x, dx)


STRATEGIES = ["ring", "ulysses", "all_gather"]


@pytest.mark.parametrize("strategy", but(STRATEGIES, ["ring"]))
@pytest.mark.parametrize("config", but(["dense", "memory-efficient"], ["dense"]))
def test_on_a_mesh(config: str, strategy: str) -> None:
    x, dx = jax.tree.map(partial(jnp.asarray, dtype="float32"), (X, DX))
    sizes = {f"ici_{axis}_parallelism": 2 for axis in ("fsdp", "context", "tensor")}
    of = CONFIGS[config].replace(context_parallel=strategy, ici_data_parallelism=1, **sizes)
    f = partial(ours, of, mesh=of.make_mesh(jax.devices()[:8]))
    close(jitted(jvp_and_grad, f)(x, dx), exact(jvp_and_grad))


def test_a_module() -> None:
    """Its tangent equals the slope between two nearby points."""
    attn = ma.FlaxAttention(16, heads=2, dim_head=8, config=DENSE, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 16)), jnp.float32)
    f = jax.jit(partial(attn, rotary_emb=ma.rope_1d(8, 12)))
    slope = (f(1.01 * x) - f(0.99 * x)) / 0.02
    close(jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x)[1], slope, 1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str) -> None:
    x, dx = jax.tree.map(partial(jnp.asarray, dtype=dtype), (X, DX))
    got = jitted(jax.jvp, partial(ours, DENSE))(x, dx)
    assert all(y.dtype in (dtype, jnp.float32) for y in jax.tree.leaves(got))
    close(jax.tree.map(lambda y: y.astype("float32"), got), exact(jax.jvp), 0.05)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_common_part_of_the_keys_costs_no_digits(config: str) -> None:
    q, k, v, dq = (jnp.asarray(x, "bfloat16") for x in (X[0], X[1] + 20, X[2], DX[0]))

    def tangent(dtype: str) -> Any:
        def out(q: Any) -> Any:
            given = (x.astype(dtype) for x in (k, v))
            return ma.attention(q, *given, mask=MASK, config=CONFIGS[config], return_lse=True)

        moved = jax.jvp(out, (q.astype(dtype),), (dq.astype(dtype),))[1]
        return [jnp.where(jnp.isfinite(x), x, 0.0).astype("float32") for x in moved]

    close(jax.jit(tangent, static_argnums=0)("bfloat16"), tangent("float32"), 0.01)
