"""Masks of equal blocks, computed as batch rows, in every GPU kernel, against float64."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels import as_batch_rows, refusal
from tests.cases import TOLERANCE, draw_operands, judge_call

pytestmark = pytest.mark.gpu
KERNELS = ("flash", "cudnn", "cudnn_flash_te", "tokamax_flash", "dot_product")


class Case(NamedTuple):
    """Queries, keys, head dim, heads and a mask of a call with two batch rows."""

    mask: M.Mask
    t: int
    s: int = 0
    head_dim: int = 64
    heads: tuple[int, int] = (4, 4)
    dtype: str = "bfloat16"


CASES = {
    "segments": Case(M.Segments.of_lengths((256,) * 4), 1024, head_dim=128),
    "odd segments, shared heads": Case(M.Segments.of_lengths((150,) * 5), 750, heads=(4, 2)),
    "short segments": Case(M.Segments.of_lengths((24,) * 20), 480, dtype="float16"),
    "block window": Case(M.BlockSlidingWindow(390, 1), 1560, head_dim=72),
    "frames": Case(M.VideoMask(6, 60, frames_per_block=2, window=1), 360, head_dim=96),
    "causal segments": Case(M.Segments.of_lengths((200,) * 4) & M.Causal(), 800, head_dim=128),
    "windows of segments": Case(M.Segments.of_lengths((256,) * 3) & M.LocalWindow(40, 9), 768),
    "texts": Case(M.Segments.of_lengths((300,) * 4, (77,) * 4), 1200, 308, head_dim=160),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", list(CASES))
def test_against_float64(kernel: str, name: str) -> None:
    case, (n, kv_heads) = CASES[name], CASES[name].heads
    s = case.s or case.t
    drawn = draw_operands(2, case.t, s, n, kv_heads, case.head_dim)
    x = {key: y.astype(case.dtype) for key, y in drawn.items()} | {"dlse": drawn["dlse"]}
    call = ma.Call.of(x["q"], x["k"], mask=case.mask)
    assert as_batch_rows(call) is not call
    if reason := refusal(kernel, call, ma.Target.here()):
        pytest.skip(str(reason))
    config = ma.AttentionConfig(attention=kernel)
    attend = partial(ma.attention, mask=case.mask, config=config, return_lse=True)
    judge_call(attend, x, case.mask, TOLERANCE[case.dtype])
