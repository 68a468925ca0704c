"""`tpu_flash` against float64: both forms of its softmax, and its gradients, with hard operands.

Also which form runs, which tiles it visits, and the sizes of its tiles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.block_sizes import DKV
from maxattn.block_sizes.sizes import facts_of
from maxattn.block_sizes.transposed import (
    backward_bytes,
    backward_tile,
    forward_bytes,
    forward_tile,
)  # fmt: skip
from maxattn.config import FlashBlockSizes
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.tpu_flash import TpuFlash
from maxattn.kernels.transposed.tile import small_scores
from tests.cases import (
    HEADS,
    KINDS,
    TOLERANCE,
    allowed,
    compare,
    draw_operands,
    judge,
    judge_call,
    run_case,
)
from tests.pairwise import name_of, pairwise
from tests.reference import attention64
from tests.waiting import but, few

SMALL = {"block_q": 128, "block_kv": 128}  # several tiles at these lengths
CONFIG = ma.AttentionConfig(attention="tpu_flash", flash_block_sizes=SMALL)
AXES = {
    "dtype": ["float32", "bfloat16"],
    "mask": [m for m in KINDS if m not in ("dense heads", "not segments")]
    + ["window | sink", "causal & lengths", "rows empty", "nothing", "flags"],
    "heads": list(HEADS)[:3],
    "length": ["odd", "one", "short", "prime"],
    "head_dim": [40, 64, 128, 160],
    "batch": [1, 2],
    "bias": ["none"],
}
B, T, S, N, K, H = 2, 130, 260, 4, 2, 32


def plain_or_float32(case: dict) -> bool:
    """In bfloat16, keep one mask of each kind, because masks of a kind share code."""
    return case["dtype"] == "float32" or case["mask"] in KINDS


@pytest.mark.parametrize(
    "case", few(pairwise(AXES, plain_or_float32, core=("dtype",))), ids=name_of
)
def test_pairs(case: dict) -> None:
    judge(case, run_case(case, CONFIG))


# ---- operands made to break a softmax ------------------------------------------------------------


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def operands(**changes: Any) -> dict[str, np.ndarray]:
    usual = {"q": normal(1, B, T, N, H), "k": normal(2, B, S, K, H), "v": normal(3, B, S, K, H)}
    return usual | {name: change(usual[name]) for name, change in changes.items()}


def with_dominant(k: np.ndarray) -> np.ndarray:
    k = k.copy()
    k[:, 200] *= 60
    return k


def one_loud_head(q: np.ndarray) -> np.ndarray:
    q = q.copy()
    q[:, :, 1] *= 100
    q[:, 128:, 2] *= 100  # of the second block alone
    return q


# operands, and the share of blocks whose scores are bounded
HARD: dict[str, tuple[dict[str, np.ndarray], float]] = {
    "usual": (operands(), 1.0),
    "huge norms": (operands(q=lambda x: 300 * x, k=lambda x: 300 * x), 0.0),
    "just bounded": (operands(q=lambda x: 5 * x / np.linalg.norm(x, axis=-1, keepdims=True),
                              k=lambda x: 72 * x / np.linalg.norm(x, axis=-1, keepdims=True)), 1.0),
    "just unbounded": (operands(q=lambda x: 5 * x / np.linalg.norm(x, axis=-1, keepdims=True),
                                k=lambda x: 76 * x / np.linalg.norm(x, axis=-1, keepdims=True)),
                       0.0),
    "one dominant key": (operands(k=with_dominant), 0.0),
    "all keys equal": (operands(k=lambda x: np.broadcast_to(x[:, :1], x.shape)), 1.0),
    "keys offset": (operands(k=lambda x: x + 10), 0.25),
    "zeros": (operands(q=lambda x: 0 * x, k=lambda x: 0 * x), 1.0),
    "huge values": (operands(v=lambda x: 1e34 * x), 0.0),
    "tiny values": (operands(v=lambda x: 1e-30 * x), 0.0),
    "no values": (operands(v=lambda x: 0 * x), 1.0),
    "loud head": (operands(q=one_loud_head), 1 - 3 / 8),
}  # fmt: skip
HARD_MASKS = {
    "full": None,
    "window": M.LocalWindow(60, 20, offset=80),
    "lengths": M.KeyPadding(np.array([150, 0], np.int32)),
}


def rounding(x: dict[str, np.ndarray]) -> float:
    """Return the tolerance: matmuls round in float32, relative to their size."""
    size = float(np.abs(x["k"]).max() * np.abs(x["q"]).max())
    return TOLERANCE["float32"] * max(1.0, size / 100)


def bounded_share(x: dict[str, np.ndarray]) -> float:
    pad = ((0, 0), (0, -T % 128), (0, 0), (0, 0))
    q = jnp.pad(x["q"] * np.float32(H**-0.5 * np.log2(np.e)), pad)
    flags = [small_scores(*(y.swapaxes(0, 1) for y in row), block_q=128)
             for row in zip(q, jnp.asarray(x["k"]), jnp.asarray(x["v"]), strict=True)]  # fmt: skip
    return float(jnp.stack(flags).mean())


@pytest.mark.parametrize("hard", HARD)
def test_the_form_is_chosen_by_the_bound(hard: str) -> None:
    x, share = HARD[hard]
    assert bounded_share(x) == pytest.approx(share)


@cache
def with_lse(mask: str) -> Any:
    """Make the program of output and LSE under a mask, the same for all operands."""
    run = partial(ma.attention, mask=HARD_MASKS[mask], config=CONFIG, return_lse=True)
    return jax.jit(run)


# Each form and its bound meet every operand; a mask meets those that take either form.
HARD_UNDER_MASKS = [
    (hard, mask)
    for hard in HARD
    for mask in HARD_MASKS
    if mask == "full" or hard in ("usual", "huge norms", "one dominant key", "keys offset")
]


@pytest.mark.parametrize(("hard", "mask"), but(product(HARD, HARD_MASKS), HARD_UNDER_MASKS))
def test_hard_operands(hard: str, mask: str) -> None:
    """Output and LSE equal float64's."""
    x, _ = HARD[hard]
    ok = allowed(HARD_MASKS[mask], T, S)
    got = with_lse(mask)(x["q"], x["k"], x["v"])
    want = attention64(x["q"], x["k"], x["v"], ok)
    compare(got, want, rounding(x))


@cache
def backward_under(mask: str) -> Any:
    """Make the program of a backward under a mask, the same for all operands."""
    x = operands()
    call = ma.Call.of(x["q"], x["k"], mask=HARD_MASKS[mask])
    kernel = ma.plan(call, CONFIG, target=ma.Target.named("cpu")).kernel
    return jax.jit(kernel.backward)


# Masks are met by what is usual, and by what takes either form.
FEW_UNDER_MASKS = [x for x in HARD_UNDER_MASKS if x[1] == "full" or x[0] == "keys offset"]


@pytest.mark.parametrize(("hard", "mask"), but(HARD_UNDER_MASKS, FEW_UNDER_MASKS))
def test_gradients_of_hard_operands(hard: str, mask: str) -> None:
    """The backward gets the exact output and LSE, as a ring passes merged ones."""
    (x, _), given = HARD[hard], HARD_MASKS[mask]
    dout, dlse = normal(4, B, T, N, H), normal(5, B, N, T)
    want = attention64(*x.values(), allowed(given, T, S), dout=dout, dlse=dlse)
    inputs = Inputs(**x, mask=(M.Full() if given is None else given).bind(T, S, B, N))
    rows = Rows(*(y.astype(np.float32) for y in want[:2]), dout, dlse)
    got = backward_under(mask)(inputs, rows)
    compare((None, None, *got[:3]), want, rounding(x))


def test_weights_of_float16_do_not_overflow() -> None:
    """Without a maximum, a score of 19 has the weight 2**27, which float16 cannot represent."""
    x = {name: y.astype(np.float16) for name, y in operands().items()}
    x["q"][0, 3, 1], x["k"][0, 5, 0] = np.array([[11], [10]]) * np.eye(1, x["q"].shape[3])
    out, lse = ma.attention(*x.values(), config=CONFIG, return_lse=True)
    compare((out, lse), attention64(*x.values()), 2e-3)


def test_no_number_stays_no_number() -> None:
    x = operands()
    x["k"][0, 5, 0, 0] = np.nan
    out = ma.attention(x["q"], x["k"], x["v"], config=CONFIG)
    assert np.isnan(out[0, :, :2]).all()
    assert np.isfinite(out[0, :, 2:]).all() and np.isfinite(out[1]).all()


def test_one_array_holds_dq() -> None:
    """Every block of keys adds to it, one step after the other: there is one block of queries."""
    keys = {"block_q_dkv": 128, "block_kv_dkv": 128}
    config = ma.AttentionConfig(attention="tpu_flash", flash_block_sizes=keys)
    call = partial(ma.attention, config=config, return_lse=True)
    judge_call(call, draw_operands(2, 128, 384, 4, 2, H), None)


def test_keys_get_float32_gradients() -> None:
    """A ring sums them over its hops before it rounds them."""
    x = {name: y.astype(jnp.bfloat16) for name, y in operands().items()}
    kernel = ma.plan(ma.Call.of(x["q"], x["k"]), CONFIG, target=ma.Target.named("cpu")).kernel
    out, lse = attention64(*x.values())[:2]
    ones = np.ones_like(out, np.float32)
    rows = Rows(*(y.astype(np.float32) for y in (out, lse)), ones, np.zeros_like(lse, np.float32))
    _, dk, dv, *_ = jax.jit(kernel.backward)(Inputs(**x), rows)
    for y in (dk, dv):
        assert y.dtype == jnp.float32
        assert (np.asarray(y) != np.asarray(y.astype(jnp.bfloat16), np.float32)).any()


def test_a_grid_of_one_step_runs_on_a_cpu_under_vmap() -> None:
    """XLA then moves the keys' transposition into a product of bfloat16. An array that stays in
    HBM cannot be batched: what is around loops over its rows.
    """
    x = draw_operands(3, 8, 8, 1, 1, 16)
    q, k, v, dout = (jnp.asarray(x[key][:, None], jnp.bfloat16) for key in ("q", "k", "v", "dout"))

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(partial(ma.attention, config=CONFIG), q, k, v)
        return out, None, *pull(dout)

    got = jax.jit(jax.vmap(both))(q, k, v, dout)
    want = attention64(*(y[:, 0] for y in (q, k, v)), dout=dout[:, 0])
    compare([None if y is None else y[:, 0] for y in got], want, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("is_turned", [False, True])
def test_values_are_transposed_before_or_inside(is_turned: bool) -> None:
    x, _ = HARD["loud head"]
    kernel = ma.plan(ma.Call.of(x["q"], x["k"]), CONFIG, target=ma.Target.named("cpu")).kernel
    kernel = replace(kernel, v_is_turned=is_turned)
    out, lse = jax.jit(kernel.forward)(Inputs(**x))
    compare((out, lse), attention64(*x.values()), 20 * TOLERANCE["float32"])


KINDS_OF_TPU = ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU v7x")


# ---- tiles that are visited ----------------------------------------------------------------------


def test_tiles_that_segment_ids_leave_empty_are_not_computed() -> None:
    """NaN in V reaches no query whose tile is skipped."""
    x = operands()
    x["v"][:, 128:] = np.nan
    lengths = M.KeyPadding(np.array([128, 64], np.int32))
    out = ma.attention(x["q"], x["k"], x["v"], mask=lengths, config=CONFIG)
    assert np.isfinite(out).all()


# ---- sizes ---------------------------------------------------------------------------------------


def call(t: int, s: int, h: int, dtype: str = "bfloat16") -> ma.Call:
    shape = jax.ShapeDtypeStruct
    return ma.Call.of(shape((1, t, 2, h), dtype), shape((1, s, 2, h), dtype))


@pytest.mark.parametrize("kind", KINDS_OF_TPU)
@pytest.mark.parametrize("h", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_fit(kind: str, h: int, dtype: str) -> None:
    target, local = ma.Target.named(kind), call(32760, 32760, h, dtype)
    for asked in (FlashBlockSizes(), FlashBlockSizes(block_q=4096, block_kv=8192)):
        facts = facts_of(local, "flash", target, training=True)
        assert facts.chip is not None
        for tile_of, bound in ((forward_tile, forward_bytes), (backward_tile, backward_bytes)):
            tile, _ = tile_of(asked, local, target)
            assert bound(tile, facts) <= facts.chip.limit
            assert all(size % 128 == 0 for size in tile[:2])


def test_what_is_asked_for_is_kept_or_said() -> None:
    target, local = ma.Target.named("TPU v6e"), call(32760, 32760, 128)
    tile, changes = forward_tile(FlashBlockSizes(block_q=1024, block_kv=1024), local, target)
    assert (tile[:2], changes) == ((1024, 1024), ())
    tile, changes = forward_tile(FlashBlockSizes(block_q=1000, block_kv=40000), local, target)
    assert tile[0] == 1024 and str(changes[0]) == "block_q: 1000 → 1024"
    assert {change.key for change in changes} >= {"block_q", "block_kv"}
    asked = FlashBlockSizes(block_q=256, block_kv=384)  # a backward follows the forward's blocks
    assert backward_tile(asked, call(4096, 4096, 128), target) == ((256, 384, 256), ())


def test_sizes_of_the_backward_are_kept_or_said() -> None:
    config = ma.AttentionConfig(attention="tpu_flash", flash_block_sizes={
        "block_q_dkv": 512, "block_kv_dkv": 1000, "block_kv_dkv_compute": 256,
        "block_q_dq": 512, "use_fused_bwd_kernel": False,
    })  # fmt: skip
    plan = ma.plan(call(32760, 32760, 128), config, target=ma.Target.named("TPU v6e"))
    assert isinstance(plan.kernel, TpuFlash)
    assert plan.kernel.blocks.part(DKV) == (512, 1024, 256)
    changes = [str(change) for change in plan.kernel.changes]
    assert changes == [
        "block_kv_dkv: 1000 → 1024",
        "use_fused_bwd_kernel: False → True",
        "block_q_dq: 512 → not used",
    ]
