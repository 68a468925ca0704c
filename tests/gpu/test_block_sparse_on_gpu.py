"""FlashAttention-4 over block-sparse lists on an NVIDIA GPU, against float64; ring shards too."""

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
from maxattn.kernels.fa4.tile_sizes import takes_lists
from tests.cases import TOLERANCE
from tests.gpu.requirements import skip_unless_available
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu

MASKS: dict[str, tuple[M.Mask, int, int]] = {
    "block window": (M.BlockSlidingWindow(390, 3), 1560, 1560),
    "aligned": (M.BlockSlidingWindow(256, 2), 1024, 1024),
    "odd": (M.BlockSlidingWindow(311, 2), 1337, 1337),
    "cached keys": (M.BlockSlidingWindow(390, 3), 390, 1950),
    "fewer keys": (M.BlockSlidingWindow(300, 2, offset=0), 1337, 700),
    "before the keys": (M.BlockSlidingWindow(300, 2, offset=-400), 1337, 700),
    "ends at tiles": (M.BlockSlidingWindow(192, 2, offset=50), 1200, 1250),
    "sink": (M.VideoMask(13, 120, 2, window=3, sink=1, first_frame_alone=True), 1560, 1560),
    "sinks, all": (M.VideoMask(12, 130, 3), 1560, 1560),
    "two intervals": (M.LocalWindow(200, 100) | M.KeyLimit(140), 1100, 1100),
    "rows empty": (~M.Causal() & M.KeyLimit(600), 1100, 1100),
    "lengths": (
        M.BlockSlidingWindow(300, 2) & M.KeyPadding(np.array([900, 1201], np.int32)),
        1300,
        1300,
    ),
    "block causal": (M.BlockCausal(390), 1560, 1560),
}
# Bands of short rows, that go by lists though the library knows bands.
BANDS: dict[str, tuple[M.Mask, int, int]] = {
    "short causal": (M.Causal(), 300, 300),
    "one tile": (M.Causal(), 64, 64),
    "causal, fewer keys": (M.Causal(offset=0), 400, 150),
    "short window": (M.LocalWindow(50, 30), 700, 700),
}
CASES = [
    *((name, "bfloat16", 64, (2, 2)) for name in MASKS),
    *((name, "bfloat16", 128, (4, 2)) for name in MASKS),
    *(("sink", "float16", h, (2, 1)) for h in (40, 96, 160, 256)),
    *(("odd", "bfloat16", h, (2, 2)) for h in (20, 80, 136, 192, 256)),
]
# Rows of tiles of many heads, so that persistent thread blocks take several rows each, and among
# them rows without a tile.
CASES += [
    (name, "bfloat16", 64, (24, 12))
    for name in ("block window", "rows empty", "before the keys", "lengths", "no mask")
]
CASES += [("no mask", "bfloat16", h, (24, 12)) for h in (72, 96, 128, 160)]
CASES += [(name, "bfloat16", h, (150, 75)) for name in BANDS for h in (40, 64, 72, 96, 128, 160)]
MASKS["no mask"] = (M.Full(), 1337, 700)
MASKS["few keys"] = (M.Full(), 300, 77)
CASES += [("few keys", "float16", h, (150, 150)) for h in (64, 72, 96, 128, 160)]
MASKS |= BANDS
H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),))


def skip_without_block_sparse() -> None:
    """Skip where flash cannot run, or takes no lists."""
    skip_unless_available("flash")
    target = ma.Target.here()
    if not takes_lists(target.version("fa4-jax") or "", target.device):
        pytest.skip(f"block-sparse lists are for Hopper GPUs and fa4-jax 0.1, and this is {target}")


def operands(t: int, s: int, head_dim: int, heads: tuple[int, int], dtype: str) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shapes = {"q": (t, heads[0]), "k": (s, heads[1]), "v": (s, heads[1]), "dout": (t, heads[0])}
    made = {
        name: jnp.asarray(rng.normal(size=(2, *shape, head_dim)), dtype)
        for name, shape in shapes.items()
    }
    return made | {"dlse": jnp.asarray(rng.normal(size=(2, heads[0], t)), "float32")}


@pytest.mark.parametrize(("name", "dtype", "head_dim", "heads"), CASES)
def test_against_float64(name: str, dtype: str, head_dim: int, heads: tuple[int, int]) -> None:
    skip_without_block_sparse()
    mask, t, s = MASKS[name]
    x = operands(t, s, head_dim, heads, dtype)
    mask = mask.bind(t, s, 2, heads[0])
    ok = np.asarray(mask.allowed(np.arange(t), np.arange(s)))
    dlse = jnp.where(ok.any(-1), x["dlse"], 0.0)
    config = ma.AttentionConfig(attention="flash")
    kernel = ma.plan(ma.Call.of(x["q"], x["k"], mask, return_lse=True), config).kernel
    assert (
        isinstance(kernel, Fa4)
        and kernel.launched
        and kernel.lists == (name not in (*BANDS, "no mask", "few keys"))
    )

    @jax.jit
    def both(q, k, v):
        run = partial(ma.attention, mask=mask, config=config, return_lse=True)
        (out, lse), vjp = jax.vjp(run, q, k, v)
        return out, lse, *vjp((x["dout"], dlse))

    got = both(x["q"], x["k"], x["v"])
    want = attention64(x["q"], x["k"], x["v"], ok, dout=x["dout"], dlse=dlse)
    errors = {
        n: error(g, w) for n, g, w in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=False)
    }
    assert max(errors.values()) < TOLERANCE[dtype], errors
    hidden = ~ok.any(-1)
    if hidden.any():
        rows = np.broadcast_to(hidden, got[1].shape)
        assert (np.asarray(got[1])[rows] == -np.inf).all()
        assert (np.asarray(got[0], np.float32).swapaxes(1, 2)[rows] == 0).all()
        assert (np.asarray(got[2], np.float32).swapaxes(1, 2)[rows] == 0).all()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", ["block window", "sink", "two intervals", "rows empty", "lengths"])
def test_shards_of_a_ring(name: str, traced: bool) -> None:
    """Half of the queries with each half of the keys: outputs merged by LSE, gradients from the LSE
    of all keys.
    """
    skip_without_block_sparse()
    mask, t, s = MASKS[name]
    x = operands(t, s, 64, (2, 2), "bfloat16")
    mask = mask.bind(t, s, 2, 2)
    ok = np.asarray(mask.allowed(np.arange(t), np.arange(s)))
    kernel = Fa4.build(
        ma.Call.of(x["q"], x["k"], mask), ma.AttentionConfig(attention="flash"), H200
    )
    assert kernel.lists
    half, cut = t // 2, s // 2
    want = attention64(x["q"], x["k"], x["v"], ok, dout=x["dout"])
    out, lse = (jnp.asarray(want[0], "bfloat16"), jnp.asarray(want[1], "float32"))

    def part(
        q_from: Any, k_from: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any
    ) -> Any:
        inputs = Inputs(q, k, v, None, mask, q_from, k_from)
        here = kernel.forward(inputs)
        grads = kernel.backward(inputs, Rows(out, lse, dout, jnp.zeros_like(lse)))
        return *here, *grads[:3]

    run = jax.jit(part, static_argnums=() if traced else (0, 1))
    dk, dv = (np.zeros(x["k"].shape) for _ in range(2))
    for r in (slice(0, half), slice(half, t)):
        q, o, d = (y[:, r] for y in (x["q"], out, x["dout"]))
        found = []
        for c in (slice(0, cut), slice(cut, s)):
            found.append(run(r.start, c.start, q, x["k"][:, c], x["v"][:, c], o, lse[:, :, r], d))
            dk[:, c] += np.asarray(found[-1][3], np.float64)
            dv[:, c] += np.asarray(found[-1][4], np.float64)
        assert error(_merged(found), np.asarray(want[0])[:, r]) < 2e-2
        assert (
            error(sum(np.asarray(f[2], np.float64) for f in found), np.asarray(want[2])[:, r])
            < 2e-2
        )
    assert error(dk, want[3]) < 2e-2
    assert error(dv, want[4]) < 2e-2


def _merged(parts: list[Any]) -> np.ndarray:
    outs, lses = ([np.asarray(p[i], np.float64) for p in parts] for i in (0, 1))
    total = np.logaddexp(*lses)
    weights = [
        np.where(np.isneginf(total), 0.0, np.exp(lse - np.where(np.isneginf(total), 0, total)))
        for lse in lses
    ]
    first, second = (
        w.swapaxes(1, 2)[..., None] * out for w, out in zip(weights, outs, strict=True)
    )
    return first + second
