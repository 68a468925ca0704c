"""Texts that are generated from rules and sizes: the table, recommendations, lines on padding."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.building.block_size_rules import rules_table
from maxattn.block_sizes import (
    adjust,
    fused_partials_bytes,
    nearest_with_less_padding,
    padding,
    padding_text,
    recommend,
    recommend_table,
)
from maxattn.block_sizes.rules import RULES
from maxattn.config import FlashBlockSizes
from maxattn.target import Target
from tests.block_sizes.asks import V5P, V6E, call
from tests.golden_text import check_golden
from tests.tries import tries

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def test_the_page_has_the_place_of_the_table_of_rules():
    assert "<!-- site: rules -->" in (GUIDE / "block_sizes.md").read_text()
    assert [line.split(" | ")[1] for line in rules_table().splitlines()[2:]] == [
        rule.needs for rule in RULES
    ]


# ---- recommendations -----------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "seq"), [(V5P, 183_600), (V6E, 75_600)])
def test_recommendations_print_as_a_table(seq, target):
    name = f"wan_{seq}_{target.device_kind.removeprefix('TPU ')}"
    check_golden(f"block_sizes/recommend_{name}", recommend_table(seq, 128, target))


@pytest.mark.parametrize("target", [V5P, V6E])
@pytest.mark.parametrize("seq", [1024, 32_760, 183_600])
def test_recommended_sizes_run_as_they_are(seq, target):
    *estimated, default, least = recommend(seq, 128, target)
    assert len(estimated) in (0, 2) and all("not run" in row.source for row in estimated)
    for row in (*estimated, default, least):
        asked = FlashBlockSizes(block_q=row.block_q, block_kv=row.block_kv)
        assert adjust(asked, call(seq), "flash", target, True)[1] == ()
        assert row.padding_q == padding(seq, row.block_q).share
    assert least.padding_q <= default.padding_q


@pytest.mark.parametrize("kind", ["NVIDIA H200", "cpu"])
def test_no_sizes_are_recommended_without_a_tpu(kind):
    assert "kernels read no block sizes" in recommend_table(4096, 64, Target.named(kind))


# ---- padding and memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "block", "step", "pads", "less"),
    [
        (183_600, 3024, 128, "184,464 (0.47%)", "3,072 (0.39%), 2,560 (0.39%), 2,304 (0.39%)"),
        (183_600, 2048, 128, "184,320 (0.39%)", "896 (0.04%), 640 (0.04%), 512 (0.11%)"),
        (183_600, 1000, 8, "184,000 (0.22%)", "1,016 (0.16%), 968 (0.17%), 1,032 (0.05%)"),
        (75_600, 3072, 128, "76,800 (1.59%)", "2,944 (1.25%), 2,816 (0.57%), 3,328 (1.25%)"),
    ],
)
def test_padding_in_words(length, block, step, pads, less):
    text = f"{block:,} pads {length:,} tokens to {pads}; less: {less}"
    assert padding_text(length, block, step) == text
    assert padding_text(75_600, 3024, 8) == "3,024 adds no padding to 75,600 tokens"


@tries(50)
@given(st.integers(1, 200_000), st.integers(1, 4096))
def test_sizes_offered_pad_less(length, block):
    offered = nearest_with_less_padding(length, block)
    most = padding(length, block).padded
    assert all(n % 128 == 0 and padding(length, n).padded < most for n in offered)
    assert list(offered) == sorted(offered, key=lambda n: (abs(n - block), n))
    least = min(padding(length, n).padded for n in range(128, max(2 * block, 128) + 1, 128))
    assert bool(offered) == (least < most)


def test_hbm_of_the_fused_backward():
    wan = call(75_600)
    asked = FlashBlockSizes(block_q=512, block_kv=512, use_fused_bwd_kernel=True)
    sizes, _ = adjust(asked, wan, "flash", V5P, True)
    assert fused_partials_bytes(wan, sizes) == 148 * 4 * 75_776 * 128 * 2
    assert fused_partials_bytes(wan, sizes, "tokamax_flash") == 148 * 4 * 75_776 * 128 * 4
    assert fused_partials_bytes(call(2048), sizes, "tokamax_flash") == 4 * 4 * 2048 * 128 * 2
    separate, _ = adjust(FlashBlockSizes(), wan, "flash", V5P, True)
    assert fused_partials_bytes(wan, separate) == 0
