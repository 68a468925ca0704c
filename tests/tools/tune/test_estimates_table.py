"""The table of estimates in the results is what its command prints."""

from __future__ import annotations

from pathlib import Path

from docs.building.tpu_estimates import table
from maxattn.call import Call
from maxattn.kernels.auto.tpu import tiled_kernels
from maxattn.target import Target
from tests.block_sizes.small_costs import HEAD_DIM, KIND, costs, own_costs, shipping

PAGE = Path(__file__).parents[3] / "docs" / "results.md"


def test_the_page_has_the_table():
    assert table() in PAGE.read_text()


def test_a_row_has_what_auto_takes_and_rates_without_padding(monkeypatch):
    call = Call(1, 75_600, 75_600, 40, 40, HEAD_DIM, "bfloat16")
    with shipping(monkeypatch, flash=costs(100, 350), tpu_flash=own_costs(700, 1000)):
        start = "| v6e | wan-14b-720p | forward |"
        rows = [row for row in table().splitlines() if row.startswith(start)]
        assert tiled_kernels(call, Target.named(KIND))[0][0] == "tpu_flash"
    # 37 x 37 tiles of 2,048 a head, at 700 bundles of 1.75 GHz.
    seconds = 40 * 37 * 37 * 700 / 1.75e9
    rate = f"{4 * 40 * 75_600**2 * HEAD_DIM / seconds / 1e12:.0f}"
    assert [row.split(" | ")[-2:] for row in rows] == [[rate, "tpu_flash |"]]
