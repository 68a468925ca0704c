"""The presets that ship are what the code makes; every TPU kernel takes them, and pads little."""

from __future__ import annotations

from pathlib import Path

import pytest

import maxattn as ma
from docs.building.presets import MODELS, files, table
from maxattn.block_sizes import adjust, padding
from maxattn.block_sizes.chips import CHIPS
from maxattn.target import Target
from tests.block_sizes.presets_of_others import PRESETS, changes_of
from tests.kernel_of import blocks_of

FOLDER = Path(__file__).parents[2] / "configs" / "block_sizes"
DOCS = Path(__file__).parents[2] / "docs"
OTHERS = DOCS / "measured" / "tpu_block_sizes.md"
KERNELS = (("flash", False), ("flash", True), ("tokamax_flash", True))
WAN_480P, WAN_720P, FLUX = 32_760, 75_600, 4608
# Which preset is for which length over how many shards.
SHARDED = {
    **{(WAN_480P, n): "wan_480p" for n in (1, 2, 4, 8)},
    **{(WAN_720P, n): "wan_720p" for n in (1, 2, 4)},
    (WAN_720P, 8): "wan_720p_context_8",
    **{(FLUX, n): "flux" for n in (1, 2, 4)},
}


def config_of(kind: str, preset: str, *overrides: str) -> ma.AttentionConfig:
    path = FOLDER / f"{kind.removeprefix('TPU ')}_{preset}.yml"
    return ma.AttentionConfig.from_yaml(path, list(overrides))


def test_the_files_are_what_the_code_makes():
    made = dict(files())
    assert {path.name: path.read_text() for path in FOLDER.glob("*.yml")} == made


@pytest.mark.parametrize("kind", CHIPS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_kernel_takes_them_as_they_are(kind, model):
    for kernel, fused in KERNELS:
        backward = f"flash_block_sizes.use_fused_bwd_kernel={fused}"
        asked = config_of(kind, model.name, backward).flash_block_sizes
        for length, _ in model.lengths:
            call = ma.Call(1, length, length, 2, 2, model.head_dim, "bfloat16")
            for training in (True, False):
                assert adjust(asked, call, kernel, Target.named(kind), training)[1] == ()


@pytest.mark.parametrize("kind", CHIPS)
@pytest.mark.parametrize(("length", "context"), SHARDED)
def test_they_pad_little(kind, length, context):
    """At most 1% unsharded and 3% at context 2, 4 and 8, with K and V whole or in shards."""
    sizes = config_of(kind, SHARDED[length, context]).flash_block_sizes
    shard, most = -(-length // context), 0.01 if context == 1 else 0.03
    assert sizes.block_q and sizes.block_kv
    assert padding(shard, sizes.block_q).share <= most
    assert padding(shard, sizes.block_kv).share <= most
    assert padding(length, sizes.block_kv).share <= most


def rows_of_others() -> list[list[str]]:
    """Read the table: preset, where, kernel, chip, pass, two verdicts, maxattn's changes."""
    page = OTHERS.read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    return [row for row in rows if row[0] in PRESETS and len(row) == 8]


def test_what_others_publish_and_the_compiler_takes_is_not_changed():
    rows = rows_of_others()
    assert {row[0] for row in rows} == set(PRESETS)
    for name, _, _, chip, phase, verdict, _, changes in rows:
        assert changes == changes_of(name, f"TPU {chip}", phase == "training")
        assert (changes == "none") == (verdict == "compiles")


def test_the_page_has_the_presets_that_ship():
    assert table() in (DOCS / "guide" / "block_sizes.md").read_text()


def plan_of_flux(kind: str, preset: str, *overrides: str) -> ma.Plan:
    call = ma.Call(1, FLUX, FLUX, 24, 24, 128, "bfloat16")
    return ma.plan(call, config_of(kind, preset, *overrides), {"context": 8}, Target.named(kind))


@pytest.mark.parametrize("kind", CHIPS)
def test_flux_over_eight_devices_pads_nothing(kind):
    """Shards of 576 tokens are no multiple of 128: a device gets the whole sequence."""
    plan = plan_of_flux(kind, "flux_context_8")
    assert plan.strategy.name == "ulysses"
    sizes = blocks_of(plan.kernel)
    assert padding(FLUX, sizes.block_q) == padding(FLUX, sizes.block_kv) == (FLUX, 0.0)
    assert plan.notes == ()
    assert min(padding(576, n).share for n in range(128, 2049, 128)) == pytest.approx(1 / 9)


def test_padding_above_a_tenth_is_a_note_in_the_plan():
    notes = plan_of_flux("TPU v5p", "flux", "context_parallel=ring").notes
    assert tuple(note for note in notes if "pads" in note) == (
        "block_q: 640 pads 576 tokens to 640 (11%); no multiple of 128 up to 1,280 pads less",
        "block_kv: 640 pads 576 tokens to 640 (11%); no multiple of 128 up to 1,280 pads less",
    )
