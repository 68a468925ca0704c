"""Padding as it is, and recommendations with their sources."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxattn.block_sizes import (
    adjust,
    fused_partials_bytes,
    nearest_with_less_padding,
    padding,
    recommend,
    recommend_table,
)
from maxattn.block_sizes.recommend import flash_attention_blocks
from maxattn.config import FlashBlockSizes
from maxattn.target import Target
from tests.block_sizes.asks import V5P, V6E, call


@pytest.mark.parametrize(
    ("block", "padded", "percent"),
    [(3024, 184464, 0.47), (2048, 184320, 0.39), (1000, 184000, 0.22)],
)
def test_padding_at_183600_tokens(block, padded, percent):
    got = padding(183_600, block)
    assert got.padded == padded
    assert round(100 * got.share, 2) == percent


def test_what_leaving_3024_costs_at_75600_tokens():
    assert padding(75_600, 3024) == (75_600, 0.0)
    assert padding(75_600, 3072) == (76_800, pytest.approx(0.0159, abs=1e-4))
    assert nearest_with_less_padding(75_600, 3072) == (2944, 2816, 3328)


@given(st.integers(1, 200_000), st.integers(1, 4096))
def test_sizes_offered_pad_less(length, block):
    offered = nearest_with_less_padding(length, block)
    most = padding(length, block).padded
    assert all(n % 128 == 0 and padding(length, n).padded < most for n in offered)
    assert list(offered) == sorted(offered, key=lambda n: (abs(n - block), n))
    least = min(padding(length, n).padded for n in range(128, max(2 * block, 128) + 1, 128))
    assert bool(offered) == (least < most)


def test_flash_attentions_formula():
    # The paper's M counts elements: an A100 has 192 KB, 163 of it for a block of threads, 2 bytes
    # an element.
    assert flash_attention_blocks(163 * 512, 64) == (64, 326)
    assert flash_attention_blocks(163 * 512, 128) == (128, 163)
    assert flash_attention_blocks(5888, 512) == (3, 3)  # ceil(2.875)
    assert flash_attention_blocks(1024, 64) == (4, 4)


@pytest.mark.parametrize("target", [V5P, V6E])
@pytest.mark.parametrize("seq", [1024, 32_760, 75_600, 183_600])
def test_what_is_recommended_for_a_tpu_runs_there(seq, target):
    rows = [row for row in recommend(seq, 128, target) if row.for_target]
    *estimated, default, least = rows
    assert len(estimated) in (0, 2) and all("not run" in row.source for row in estimated)
    for row in rows:
        asked = FlashBlockSizes(block_q=row.block_q, block_kv=row.block_kv)
        assert adjust(asked, call(seq), "flash", target, True)[1] == ()
        assert row.padding_q == padding(seq, row.block_q).share
    assert least.padding_q <= default.padding_q


def test_every_row_names_its_source():
    for kind in ("TPU v5p", "NVIDIA H200"):
        rows = recommend(4096, 64, Target.named(kind))
        assert rows and all(row.source for row in rows)
    assert "no kernel on it reads block sizes" in recommend_table(4096, 64, Target.named("cpu"))


def test_hbm_of_the_fused_backward():
    wan = call(75_600)
    asked = FlashBlockSizes(block_q=512, block_kv=512, use_fused_bwd_kernel=True)
    sizes, _ = adjust(asked, wan, "flash", V5P, True)
    assert fused_partials_bytes(wan, sizes) == 148 * 4 * 75_776 * 128 * 2
    assert fused_partials_bytes(wan, sizes, "tokamax_flash") == 148 * 4 * 75_776 * 128 * 4
    assert fused_partials_bytes(call(2048), sizes, "tokamax_flash") == 4 * 4 * 2048 * 128 * 2
    separate, _ = adjust(FlashBlockSizes(), wan, "flash", V5P, True)
    assert fused_partials_bytes(wan, separate) == 0
