"""Text made of the rules and the sizes: the flowchart, the tables, and lines about padding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.building.flowchart import page, rules_table
from maxattn.block_sizes import RULES, padding_text, recommend_table
from maxattn.target import Target
from tests.golden_text import check_golden

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def test_the_rules_are_documented_as_they_are():
    assert rules_table() in (GUIDE / "block_sizes.md").read_text()


def test_the_flowchart_is_what_the_rules_print():
    assert (GUIDE / "block_sizes_flowchart.md").read_text() == page()


def test_every_rule_is_in_the_flowchart_once_and_every_arrow_joins_two_nodes():
    chart = page().split("```")[1]
    for number, rule in enumerate(RULES, 1):
        assert chart.count(f"rule {number}: {rule.needs}") == 1
    nodes = set(re.findall(r"^  (\w+)[\[({]", chart, re.M)) | {"run"}
    arrows = re.findall(r"^  (\w+) (?:-- [^>]+ )?--> (\w+)", chart, re.M)
    assert {end for arrow in arrows for end in arrow} == nodes


@pytest.mark.parametrize(
    ("name", "seq", "kind"),
    [
        ("wan_183600_v5p", 183_600, "TPU v5p"),
        ("wan_75600_v6e", 75_600, "TPU v6e"),
        ("sdxl_h200", 4096, "NVIDIA H200"),
    ],
)
def test_recommendations_print_as_a_table(name, seq, kind):
    check_golden(f"block_sizes/recommend_{name}", recommend_table(seq, 128, Target.named(kind)))


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
    assert padding_text(75_600, 3024, 8) == "3,024 pads nothing of 75,600 tokens"
