"""Tests of splash alone: mask codes, tile schedules, traced offsets, a given LSE, refusals."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.block_sizes import BlockSizes
from maxattn.errors import Unsupported
from maxattn.kernels.base import Inputs
from maxattn.kernels.flash import Flash
from maxattn.kernels.softmax import merge_by_lse
from maxattn.kernels.splash.kernel import Splash
from maxattn.kernels.splash.mask_codes import OneInterval, Positions, Shards, encode
from maxattn.kernels.splash.mask_info import schedule
from tests.cases import compare, draw_operands
from tests.golden_text import check_golden
from tests.kernels.shards import by_shards
from tests.reference import attention64, error
from tests.waiting import but

CPU, V5P = (ma.Target.named(kind) for kind in ("cpu", "TPU v5p"))
FUSED = BlockSizes(128, 128, 128, 128, 256, 128, use_fused_bwd_kernel=True)
UNFUSED = BlockSizes(128, 256, 128, 128, 128, 128, 128, 256, False)
VIDEO = M.VideoMask(8, 32, 2, window=2, sink=1, offset=0)
POSITIONS = {
    "full": M.Full(),
    "causal": M.Causal(0),
    "window": M.LocalWindow(20, 9, 0),
    "from": M.LocalWindow(9, None, 0),
    "blocks": M.BlockSlidingWindow(24, 3, 0),
    "limit": M.BlockCausal(24, 0) & M.KeyLimit(200),
    "video": VIDEO,
    "hole": ~M.LocalWindow(20, 30, 0),
    "either": M.BlockSlidingWindow(24, 2, 0) | M.KeyLimit(9),
    "none": M.Empty(),
}
OF_TWO_INTERVALS = ("video", "hole", "either", "none")
LENGTH, SHARD = 256, 128


def call(t: int = 256, s: int = 0, n: int = 4, h: int = 64, dtype: str = "bfloat16", **rest) -> Any:
    q, k = (jax.ShapeDtypeStruct((1, length, n, h), dtype) for length in (t, s or t))
    return ma.Call.of(q, k, **rest)


@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
@pytest.mark.parametrize("name", POSITIONS)
def test_a_code_says_what_the_mask_says(name: str, traced: bool) -> None:
    mask, kv_len = POSITIONS[name], SHARD
    for q_offset, kv_offset in ((0, 0), (SHARD, 0), (0, SHARD), (SHARD, SHARD)):
        offsets = (jnp.int32(q_offset), jnp.int32(kv_offset)) if traced else (q_offset, kv_offset)
        rows = encode(mask, 100, kv_len, *offsets)
        kind = (Shards if traced else Positions) if name in OF_TWO_INTERVALS else OneInterval
        assert isinstance(rows.code, kind)
        # Keys past the real ones are padding, and never allowed.
        kv = np.broadcast_to(np.arange(kv_len + 40, dtype=np.int32), (100, kv_len + 40))
        values = jnp.broadcast_to(rows.values[:, None], kv.shape)
        got = np.asarray(rows.code(values, jnp.asarray(kv)))
        want = np.asarray(mask.allowed(np.arange(100), np.arange(kv_len), q_offset, kv_offset))
        assert (got[:, :kv_len] == np.broadcast_to(want[0, 0], (100, kv_len))).all()
        assert not got[:, kv_len:].any()


@pytest.mark.parametrize("density", [0.0, 0.1, 0.6, 1.0])
def test_a_schedule_visits_each_tile_once(density: float) -> None:
    visited = np.random.default_rng(3).random((9, 13)) < density
    for shrink in (True, False):
        data, runs = schedule(visited, shrink)
        for row in range(9):
            assert data[row][runs[row] == 1].tolist() == np.flatnonzero(visited[row]).tolist()
        flat, on = data.reshape(-1), runs.reshape(-1)
        for step in range(flat.shape[0]):
            ahead = np.flatnonzero(on[step:])
            # A step that idles fetches the tile of the next one that does not.
            assert not ahead.size or flat[step] == flat[step + ahead[0]]
    traced = jax.jit(partial(schedule, shrink=True))(jnp.asarray(visited))
    for mine, theirs in zip(schedule(visited, shrink=False), traced, strict=True):
        assert (mine == np.asarray(theirs)).all()


def whole(mask: M.Mask, kernel: Splash) -> tuple:
    """Compute 2 x 2 shards, and what is expected."""
    x = draw_operands(1, LENGTH, LENGTH, 4, 2, 64)
    ok = np.asarray(mask.allowed(np.arange(LENGTH), np.arange(LENGTH)))
    x["dlse"] = x["dlse"] * ok.any(-1)
    want = attention64(x["q"], x["k"], x["v"], ok, dout=x["dout"], dlse=x["dlse"])
    return by_shards(kernel, mask, x, SHARD), want


@pytest.mark.parametrize("cuts", [(), (40,), (0,), (77,), (7, 8, 61), (0, 20, 20, 77)])
@pytest.mark.parametrize("level", [0.0, 300.0])
def test_parts_are_merged_as_in_float64(cuts: tuple[int, ...], level: float) -> None:
    """A part without keys has NaN; exp overflows for scores of 300."""
    rng, bounds = np.random.default_rng(1), [0, *cuts, 77]
    q, k, v = (rng.normal(size=(2, length, 3, 8)) for length in (9, 77, 77))
    bias = np.full((1, 1, 1, 77), level)
    want, parts = attention64(q, k, v, bias=bias), []
    for a, b in pairwise(bounds):
        part = np.full((2, 9, 3, 8), np.nan), np.full((2, 3, 9), -np.inf)
        if b > a:
            part = attention64(q, k[:, a:b], v[:, a:b], bias=bias[..., a:b])[:2]
        parts.append([jnp.asarray(x, jnp.float32) for x in part])
    out, lse = jax.jit(merge_by_lse)(parts)
    assert out.dtype == lse.dtype == jnp.float32
    assert error(out, want.out) < 1e-6 + level * 2e-8 and error(lse, want.lse) < 1e-6
    nothing = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    out, lse = merge_by_lse([nothing] * len(parts))
    assert (out == 0).all() and (lse == -jnp.inf).all()


MERGED = [("full", FUSED), ("blocks", UNFUSED), ("blocks", FUSED), ("video", UNFUSED)]


@pytest.mark.parametrize(("name", "sizes"), but(MERGED, MERGED[:2]))
def test_shards_with_traced_offsets_and_a_merged_lse(name: str, sizes: BlockSizes) -> None:
    compare(*whole(POSITIONS[name], Flash(64**-0.5, sizes, interpret=True)))


TOO_LONG = {
    "positions": (2**21, 8, M.VideoMask(2**14, 128, 4, window=3, sink=1)),
    "shards": (2304 * 448, 2304, M.VideoMask(8064, 128, 4, window=3, sink=1)),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_sequence_too_long_for_the_codes_is_refused_in_the_plan(name: str) -> None:
    length, devices, mask = TOO_LONG[name]
    asked = call(length, n=1, mask=mask)

    def plan(target: ma.Target, strategy: str = "ring", **settings: str) -> ma.Plan:
        config = ma.AttentionConfig(context_parallel=strategy, **settings)
        return ma.plan(asked, config, {"context": devices}, target)

    with pytest.raises(Unsupported) as caught:
        plan(V5P, attention="flash")
    check_golden(f"refused/flash_too_many_{name}", f"{type(caught.value).__name__}\n{caught.value}")
    other = plan(V5P)  # auto
    assert other.kernel.name in ("memory_efficient", "dot_product") and not other.fell_back
    assert plan(V5P, "all_gather", attention="flash").kernel.name == "flash"  # offsets of keys: 0


def test_shorter_sequences_and_masks_of_one_interval_are_not_refused() -> None:
    frames = M.VideoMask(2**13, 128, 4, window=3, sink=1)
    for length, mask in ((2**20, frames), (2**21, M.BlockSlidingWindow(1560, 4))):
        config = ma.AttentionConfig(attention="flash", context_parallel="ring")
        plan = ma.plan(call(length, n=1, mask=mask), config, {"context": 8}, V5P)
        assert plan.kernel.name == "flash"


def test_known_offsets_are_refused_before_tracing_goes_on() -> None:
    kernel, x = Flash(0.125, UNFUSED, interpret=True), jnp.ones((1, SHARD, 1, 64))

    def run(offset: jax.Array) -> jax.Array:
        return kernel.forward(Inputs(x, x, x, None, VIDEO, 2**20, offset)).out

    with pytest.raises(Unsupported) as caught:
        jax.eval_shape(run, jnp.int32(0))
    check_golden("refused/flash_known_offset", f"{type(caught.value).__name__}\n{caught.value}")


def test_very_negative_scores_and_rows_with_nothing() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 40, 2, 64)), "float32") for _ in range(3))
    q, k = jnp.abs(q) * 1e3, -jnp.abs(k) * 1e3
    mask = M.LocalWindow(0, 8, 0) & ~M.KeyLimit(20)  # the first 12 queries see nothing
    config = ma.AttentionConfig(attention="flash")
    attend = partial(ma.attention, mask=mask, config=config)
    grads = jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))(q, k, v)
    out, lse = ma.attention(q, k, v, mask=mask, config=config, return_lse=True)
    allowed = np.asarray(mask.allowed(np.arange(40), np.arange(40)))
    compare((out, lse), attention64(q, k, v, allowed))
    assert np.isneginf(np.asarray(lse[:, :, :12])).all()
    assert all(np.isfinite(np.asarray(g)).all() for g in grads)
    for zero in (out[:, :12], grads[0][:, :12], grads[1][:, :20]):
        assert not np.asarray(zero).any()


TOKAMAX_CPU, TOKAMAX_V5P = (
    ma.Target.named(kind, (("tokamax", "0.0.17"),)) for kind in ("cpu", "TPU v5p")
)
TABLE, BIAS = call(mask=M.Dense(np.ones((256, 256), bool))), call(bias=jnp.zeros((256, 256)))
REFUSED = {
    "flash_dense": (TABLE, CPU),
    "flash_data_under_or": (call(mask=M.KeyPadding(np.array([9])) | M.Causal(0)), CPU),
    "flash_data_negated": (call(mask=~M.KeyPadding(np.array([9]))), CPU),
    "flash_two_segments": (call(mask=M.Segments(*[np.zeros((1, 256), np.int32)] * 2) & M.Segments(
        *[np.ones((1, 256), np.int32)] * 2)), CPU),
    "flash_bias": (BIAS, CPU),
    "flash_float16_on_tpu": (call(dtype="float16"), V5P),
    "tokamax_dense": (TABLE, TOKAMAX_CPU),
    "tokamax_bias": (BIAS, TOKAMAX_V5P),
    "tokamax_float16_on_tpu": (call(dtype="float16"), TOKAMAX_V5P),
    "tokamax_not_installed": (call(), V5P),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    asked, target = REFUSED[name]
    kernel = "tokamax_flash" if name.startswith("tokamax") else "flash"
    with pytest.raises(Unsupported) as caught:
        ma.plan(asked, ma.AttentionConfig(attention=kernel), target=target)
    check_golden(f"refused/{name}", f"{type(caught.value).__name__}\n{caught.value}")


BLOCKS = {"block_kv": 1024, "block_kv_compute": 512}
SETTINGS = {
    "flash": {"attention": "flash", "flash_block_sizes": BLOCKS | {"use_fused_bwd_kernel": True}},
    "tokamax": {
        "attention": "tokamax_flash", "use_base2_exp": True, "use_experimental_scheduler": True,
        "flash_block_sizes": BLOCKS | {"block_q_dq": 512, "block_kv_dq": 512},
    },
}  # fmt: skip


@pytest.mark.parametrize(("where", "target"), [("cpu", TOKAMAX_CPU), ("tpu", TOKAMAX_V5P)])
@pytest.mark.parametrize("kernel", SETTINGS)
def test_explain(kernel: str, where: str, target: ma.Target) -> None:
    wan = call(32_760, n=12, h=128, mask=M.BlockSlidingWindow(1560, 7))
    plan = ma.plan(wan, ma.AttentionConfig(**SETTINGS[kernel]), target=target)
    check_golden(f"explain/{kernel}_{where}", plan.explain())


def test_auto_takes_it_on_a_tpu_and_never_in_interpret_mode() -> None:
    assert ma.plan(call(32_760), target=V5P).kernel.name == "flash"
    assert ma.plan(call(32_760, dtype="float16"), target=V5P).kernel.name == "memory_efficient"
    assert ma.plan(call(64), target=V5P).kernel.name == "dot_product"
    assert ma.plan(call(32_760), target=CPU).kernel.name == "memory_efficient"
