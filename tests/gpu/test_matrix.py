"""The matrix on an NVIDIA GPU (`make test-gpu`): fused kernels are right, or refuse by name. Beside
it what the matrix does not draw: 64-bit mode, values of another head dim, float16's range, blocks
as batch rows, many rectangles, slices at any address.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import Unsupported
from maxattn.kernels import as_batch_rows
from tests.cases import (
    LENGTHS,
    MASKS,
    TOLERANCE,
    allowed,
    compare,
    draw_operands,
    judge,
    judge_call,
    run_case,
)
from tests.gpu.requirements import skip_unless_available, skip_unless_taken
from tests.kernels import test_value_head_dim as values
from tests.kernels.test_gradient_scale import judge as judge_range
from tests.kernels.test_gradient_scale import operands
from tests.pairwise import name_of, pairwise
from tests.reference import attention64

pytestmark = pytest.mark.gpu

KERNELS = ["cudnn", "cudnn_flash_te", "flash", "tokamax_flash"]
AXES = {
    "kernel": KERNELS,
    "mask": list(MASKS),
    "dtype": ["bfloat16", "float16"],
    "heads": ["mha", "gqa", "mqa"],
    "length": list(LENGTHS),
    "head_dim": [40, 64, 72, 80, 96, 128, 160, 256],
    "bias": ["none"],
    "batch": [1, 3],
}


def judge_or_refuse(case: dict, record: Any, devices: int = 1, **settings: Any) -> None:
    """Compare a case with float64; without a bias, a refusal that names the kernel is right too."""
    config = ma.AttentionConfig(attention=case["kernel"], **settings)
    mesh = config.make_mesh(jax.devices()[:devices]) if devices > 1 else None
    try:
        errors = run_case(case, config, mesh)
    except Unsupported as refused:
        assert case["kernel"] in str(refused) and case["bias"] == "none", refused
        record("refused", str(refused))
        return
    record("errors", errors)
    jax.clear_caches()
    judge(case, errors)


@pytest.mark.parametrize("case", pairwise(AXES, lambda case: True), ids=name_of)
def test_pairs(case: dict, record_property: Any) -> None:
    skip_unless_available(case["kernel"])
    judge_or_refuse(case, record_property)


@pytest.mark.parametrize("mask", ["full", "causal & lengths", "block window", "segments"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_64_bit_mode(kernel: str, mask: str, record_property: Any) -> None:
    """It changes no dtype of a result."""
    skip_unless_available(kernel)
    case = {"kernel": kernel, "mask": mask, "bias": "none", "dtype": "bfloat16", "heads": "gqa"}
    with jax.enable_x64(True):
        judge_or_refuse(case | {"length": "odd", "head_dim": 64, "batch": 3}, record_property)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_of_another_head_dim(kernel: str, dims: tuple[int, int], mask: str) -> None:
    skip_unless_available(kernel)
    case: dict[str, Any] = {"mask": mask, "dims": dims, "length": "64", "heads": "mha"}
    x = values.arrays(case | {"dtype": "bfloat16", "bias": "none"})
    attend = partial(ma.attention, mask=x["mask"], config=ma.AttentionConfig(attention=kernel))
    out, pull = jax.vjp(jax.jit(attend), x["q"], x["k"], x["v"])
    want = attention64(x["q"], x["k"], x["v"], x["ok"], dout=x["dout"])
    compare((out, None, *pull(x["dout"])), want, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("size", [10_000.0, 1e-6])
@pytest.mark.parametrize("kernel", KERNELS[:3])
def test_gradients_at_both_ends_of_the_range_of_float16(kernel: str, size: float) -> None:
    skip_unless_available(kernel)
    judge_range(operands(size), {"attention": kernel})


class Case(NamedTuple):
    """A mask, queries, keys, head dim, heads and the dtype."""

    mask: M.Mask
    t: int
    s: int = 0
    head_dim: int = 64
    heads: tuple[int, int] = (4, 4)
    dtype: str = "bfloat16"


# Equal blocks, which are computed as rows of the batch.
ROWS = {
    "segments": Case(M.Segments.of_lengths((256,) * 4), 1024, head_dim=128),
    "odd segments, shared heads": Case(M.Segments.of_lengths((150,) * 5), 750, heads=(4, 2)),
    "short segments": Case(M.Segments.of_lengths((24,) * 20), 480, dtype="float16"),
    "block window": Case(M.BlockSlidingWindow(390, 1), 1560, head_dim=72),
    "frames": Case(M.VideoMask(6, 60, frames_per_block=2, window=1), 360, head_dim=96),
    "causal segments": Case(M.Segments.of_lengths((200,) * 4) & M.Causal(), 800, head_dim=128),
    "windows of segments": Case(M.Segments.of_lengths((256,) * 3) & M.LocalWindow(40, 9), 768),
    "texts": Case(M.Segments.of_lengths((300,) * 4, (77,) * 4), 1200, 308, head_dim=160),
}
# Unions of many rectangles, for FlashAttention-4 alone: corners of each.
LENGTH = 1500
CORNERS = {
    "small steps": [(i, i + 10, max(0, i - 90), i + 10) for i in range(0, LENGTH, 10)],
    "several intervals": [
        (i, i + 50, j, j + 20) for i in range(0, LENGTH, 50) for j in range(i % 7, i, 200)
    ],
    "whole tiles": [(i, i + 128, 0, i + 128) for i in range(0, LENGTH - 127, 128)]
    + [(i, i + 3, i, i + 3) for i in range(0, LENGTH, 30)],
}


def check_case(case: Case, kernel: str, mask: M.Mask) -> None:
    """Compare a case with float64, which is given its mask in the form `mask`."""
    drawn = draw_operands(2, case.t, case.s or case.t, *case.heads, case.head_dim)
    x = {key: y.astype(jnp.dtype(case.dtype)) for key, y in drawn.items()}
    seen = np.asarray(allowed(mask, case.t, case.s or case.t)).any(-1)
    config = ma.AttentionConfig(attention=kernel)
    attend = partial(ma.attention, mask=case.mask, config=config, return_lse=True)
    judge_call(attend, x | {"dlse": drawn["dlse"] * seen}, mask, TOLERANCE[case.dtype])


@pytest.mark.parametrize("kernel", [*KERNELS, "dot_product"])
@pytest.mark.parametrize("name", ROWS)
def test_blocks_as_batch_rows(kernel: str, name: str) -> None:
    case, (heads, kv_heads) = ROWS[name], ROWS[name].heads
    sizes = 2, case.t, case.s or case.t, heads, kv_heads, case.head_dim
    call = ma.Call(*sizes, case.dtype, case.mask.bind(*sizes[1:3]))
    assert as_batch_rows(call) is not call
    skip_unless_taken(kernel, call)
    check_case(case, kernel, case.mask)


@pytest.mark.parametrize("name", CORNERS)
def test_many_rectangles(name: str) -> None:
    skip_unless_available("flash")
    table = np.zeros((LENGTH, LENGTH), bool)
    for q0, q1, k0, k1 in CORNERS[name]:
        table[q0:q1, k0:k1] = True
    mask = M.Or(tuple(M.Rectangle(*each) for each in CORNERS[name]))
    check_case(Case(mask, LENGTH, heads=(2, 2)), "flash", M.Dense(table))


T, WHOLE = 31, 40
SLICED: dict[str, M.Mask] = {
    "full": M.Full(),
    "causal": M.Causal(),
    "window with an offset": M.BlockSlidingWindow(1, 3, offset=3),
    "lengths": M.KeyPadding(np.array([17], np.int32)),
    "segments": M.Segments(*(np.arange(T)[None] // 9,) * 2),
    "blocks": M.BlockSlidingWindow(8, 2),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("mask", SLICED)
def test_slices_that_start_anywhere(kernel: str, heads: int, mask: str) -> None:
    """XLA hands slices of one example's tokens to a kernel where they lie: 128 bytes apart."""
    given = SLICED[mask]
    skip_unless_taken(kernel, ma.Call(1, T, T, heads, heads, 32, "bfloat16", mask=given))
    rng, starts = np.random.default_rng(0), (1, 3, 5, 7)
    whole = [jnp.asarray(rng.normal(size=(1, WHOLE, heads, 32)), jnp.bfloat16) for _ in range(4)]
    attend = partial(ma.attention, mask=given, config=ma.AttentionConfig(attention=kernel))

    @jax.jit
    def step(*whole: jax.Array) -> Any:
        q, k, v, dout = (x[:, s : s + T] for x, s in zip(whole, starts, strict=True))
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    got = step(*whole)
    q, k, v, dout = (np.asarray(x[:, s : s + T], "f") for x, s in zip(whole, starts, strict=True))
    want = attention64(q, k, v, allowed(given, T, T), dout=dout)
    compare((got[0], None, *got[1:]), want, TOLERANCE["bfloat16"])
