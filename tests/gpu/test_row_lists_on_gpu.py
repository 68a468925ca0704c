"""FlashAttention-4 under masks with arrays on a Hopper GPU, against float64: drawn ids and lengths,
shards of a ring, `vmap` and remat.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.fa4.kernel import Fa4
from tests.cases import TOLERANCE
from tests.gpu.test_block_sparse_on_gpu import H200, _merged, skip_without_block_sparse
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(11)
CONFIG = ma.AttentionConfig(attention="flash")


def sorted_ids(batch: int, length: int, segments: int) -> np.ndarray:
    return np.sort(RNG.integers(0, segments, (batch, length)), axis=1).astype(np.int32)


def cut(*lengths: int) -> np.ndarray:
    return np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int32)


def twice(ids: np.ndarray) -> M.Mask:
    return M.Segments(ids, ids)


MASKS: dict[str, tuple[M.Mask, int, int]] = {
    "sorted": (twice(sorted_ids(2, 1337, 5)), 1337, 1337),
    "unsorted": (twice(RNG.integers(-1, 3, (2, 1100))), 1100, 1100),
    "rows of padding": (
        twice(np.where(np.arange(900) < np.array([[500], [0]]), sorted_ids(2, 900, 3), -1)),
        900,
        900,
    ),
    "empty segments": (
        M.Segments(np.repeat(cut(300, 0, 128, 272), 2, 0), np.repeat(cut(0, 500, 128, 483), 2, 0)),
        700,
        1111,
    ),
    "shared": (twice(cut(256, 384, 37, 623)), 1300, 1300),
    "causal & segments": (M.Causal() & twice(sorted_ids(2, 1300, 4)), 1300, 1300),
    "causal & lengths": (M.Causal() & M.KeyPadding(np.array([700, 0], np.int32)), 1001, 1001),
    "window & flags": (
        M.LocalWindow(200, 90) & M.KeyPadding(RNG.random((2, 1200)) < 0.7),
        1200,
        1200,
    ),
    "frames & segments & lengths": (
        M.BlockSlidingWindow(150, 3)
        & twice(sorted_ids(2, 1200, 3))
        & M.KeyPadding(np.array([1200, 801], np.int32)),
        1200,
        1200,
    ),
    "lengths": (M.KeyPadding(np.array([60, 512], np.int32)), 1500, 512),
    "lengths, one 0": (M.KeyPadding(np.array([0, 301], np.int32)), 1500, 333),
    "lengths, long": (M.KeyPadding(np.array([1777, 640], np.int32)), 900, 1777),
    "flags": (M.KeyPadding(RNG.random((2, 400)) < np.array([[0.8], [0.1]])), 700, 400),
    # more tiles in a row than a word has bits, and rows of many and of few
    "long and short": (twice(cut(1300, 64, 200, 130, 3, 503)), 2200, 2200),
    "segments of known lengths": (M.Segments.of_lengths((700, 13, 64, 400, 160)), 1337, 1337),
}
CASES = [
    *((name, "bfloat16", 128, (4, 4)) for name in MASKS),
    *((name, "bfloat16", 64, (4, 2)) for name in MASKS),
    *((name, "float16", h, (2, 2)) for name in ("sorted", "lengths") for h in (40, 96, 192)),
    *((name, "bfloat16", 128, (24, 24)) for name in ("sorted", "lengths")),  # many rows an SM
]


def operands(t: int, s: int, head_dim: int, heads: tuple[int, int], dtype: str) -> dict[str, Any]:
    shapes = {"q": (t, heads[0]), "k": (s, heads[1]), "v": (s, heads[1]), "dout": (t, heads[0])}
    return {
        name: jnp.asarray(RNG.normal(size=(2, *shape, head_dim)), dtype)
        for name, shape in shapes.items()
    }


def both(mask: M.Mask, q: Any, k: Any, v: Any, dout: Any) -> Any:
    run = partial(ma.attention, mask=mask, config=CONFIG, return_lse=True)
    (out, lse), vjp = jax.vjp(run, q, k, v)
    return out, lse, *vjp((dout, jnp.zeros_like(lse)))


def judge(got: Any, x: dict[str, Any], mask: M.Mask, dtype: str) -> None:
    t, s = x["q"].shape[1], x["k"].shape[1]
    ok = np.asarray(mask.bind(t, s).allowed(np.arange(t), np.arange(s)))
    want = attention64(x["q"], x["k"], x["v"], ok, dout=x["dout"])
    names = ("out", "lse", "dq", "dk", "dv")
    errors = {n: error(g, w) for n, g, w in zip(names, got, want, strict=False)}
    assert max(errors.values()) < TOLERANCE[dtype], errors
    hidden = np.broadcast_to(~ok.any(-1), got[1].shape)
    assert (np.asarray(got[1])[hidden] == -np.inf).all()
    assert not np.asarray(got[0], np.float32).swapaxes(1, 2)[hidden].any()
    assert not np.asarray(got[2], np.float32).swapaxes(1, 2)[hidden].any()


@pytest.mark.parametrize(("name", "dtype", "head_dim", "heads"), CASES)
def test_against_float64(name: str, dtype: str, head_dim: int, heads: tuple[int, int]) -> None:
    skip_without_block_sparse()
    mask, t, s = MASKS[name]
    x = operands(t, s, head_dim, heads, dtype)
    kernel = ma.plan(ma.Call.of(x["q"], x["k"], mask.bind(t, s)), CONFIG).kernel
    of_keys = name.startswith(("lengths", "flags"))
    assert isinstance(kernel, Fa4) and kernel.launched and kernel.lists is not of_keys
    judge(jax.jit(both)(mask, *x.values()), x, mask, dtype)


@pytest.mark.parametrize("name", ["sorted", "unsorted", "causal & segments", "causal & lengths"])
def test_shards_of_a_ring(name: str) -> None:
    """Half of the queries with each half of the keys, whose ids and positions are traced."""
    skip_without_block_sparse()
    whole, t, s = MASKS[name]
    x = operands(t, s, 64, (2, 2), "bfloat16")
    ok = np.asarray(whole.bind(t, s).allowed(np.arange(t), np.arange(s)))
    want = attention64(x["q"], x["k"], x["v"], ok, dout=x["dout"])
    out, lse = jnp.asarray(want[0], "bfloat16"), jnp.asarray(want[1], "float32")
    call = ma.Call.of(x["q"], x["k"], whole.bind(t, s))
    kernel, half, edge = Fa4.build(call, CONFIG, H200), t // 2, s // 2

    @jax.jit
    def part(q_from: Any, k_from: Any, mask: M.Mask, *arrays: Any) -> Any:
        q, k, v, out, lse, dout = arrays
        inputs = Inputs(q, k, v, None, mask, q_from, k_from)
        rows = Rows(out, lse, dout, jnp.zeros_like(lse))
        return *kernel.forward(inputs), *kernel.backward(inputs, rows)[:3]

    def cut_ids(q_part: slice, kv_part: slice) -> M.Mask:
        def of(x: Any, axes: str) -> Any:
            return x[:, {"T": q_part, "S": kv_part}[axes[1]]] if len(axes) > 1 else x

        bound = whole.bind(t, s)
        return jax.tree.map(of, bound, bound.leaf_axes())

    dk, dv = (np.zeros(x["k"].shape) for _ in range(2))
    for r in (slice(0, half), slice(half, t)):
        q, o, d = (y[:, r] for y in (x["q"], out, x["dout"]))
        found = []
        for c in (slice(0, edge), slice(edge, s)):
            arrays = q, x["k"][:, c], x["v"][:, c], o, lse[:, :, r], d
            found.append(part(jnp.int32(r.start), jnp.int32(c.start), cut_ids(r, c), *arrays))
            dk[:, c] += np.asarray(found[-1][3], np.float64)
            dv[:, c] += np.asarray(found[-1][4], np.float64)
        assert error(_merged(found), np.asarray(want[0])[:, r]) < 2e-2
        dq = sum(np.asarray(f[2], np.float64) for f in found)
        assert error(dq, np.asarray(want[2])[:, r]) < 2e-2
    assert error(dk, want[3]) < 2e-2 and error(dv, want[4]) < 2e-2


def test_under_vmap_and_remat() -> None:
    """Each example has ids of its own, and a batch of one."""
    skip_without_block_sparse()
    mask, t, s = MASKS["sorted"]
    x = operands(t, s, 64, (2, 2), "bfloat16")
    ids = jnp.asarray(jax.tree.leaves(mask)[0])

    def one(ids: Any, *arrays: Any) -> Any:
        run = jax.checkpoint(lambda ids, *y: both(M.Segments(ids, ids), *y))
        return run(ids, *arrays)

    got = jax.jit(jax.vmap(one))(ids[:, None], *(y[:, None] for y in x.values()))
    judge([y[:, 0] for y in got], x, mask, "bfloat16")
