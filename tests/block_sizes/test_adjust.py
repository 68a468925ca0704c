"""Known requests: the documented examples, presets, and every log line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import maxattn as ma
from maxattn.block_sizes import DKV, FORWARD, BlockSizes, Change, adjust, facts_of, log_lines
from maxattn.block_sizes.vmem import fits
from maxattn.config import FlashBlockSizes
from maxattn.target import Target
from tests.block_sizes.asks import CPU, CROSS_LENGTHS, V5P, call, uniform
from tests.block_sizes.presets_of_others import PRESETS, changes_of
from tests.golden_text import check_golden


def test_text_of_77_tokens_clips_the_kv_blocks_as_documented():
    asked = FlashBlockSizes(block_q=512, block_kv=512, block_kv_compute=512)
    sizes, changes = adjust(asked, call(4096, 77), "flash", V5P, training=False)
    assert sizes == BlockSizes(512, 128, 128)
    expected = (
        "Modified block sizes for cross-attention:\n"
        "  block_kv: 512 → 128 (text sequence length 77)\n"
        "  block_kv_compute: 512 → 128"
    )
    assert log_lines("cross", changes) == expected


@pytest.mark.parametrize("kernel", ["flash", "tokamax_flash"])
@pytest.mark.parametrize("length", CROSS_LENGTHS)
def test_cross_attention_clips_to_the_text_rounded_up_to_128(length, kernel):
    sizes, changes = adjust(uniform(512), call(32760, length), kernel, V5P, training=True)
    most = min(512, -(-length // 128) * 128)
    assert {getattr(sizes, key) for key in (*FORWARD[1:], *DKV[1:])} == {most}
    assert (sizes.block_q, sizes.block_q_dkv) == (512, 512)
    clipped = [c for c in changes if c.reason == f"text sequence length {length}"]
    assert bool(clipped) == (length <= 384)


@pytest.mark.parametrize("kind", ["TPU v6e", "TPU v7x"])
def test_4096_queries_by_1024_keys_take_too_much_vmem(kind):
    """libtpu 0.0.50.1 needs 32.2 MiB of 32 if the operands are in HBM."""
    asked = FlashBlockSizes(block_q=4096, block_kv=1024, block_kv_compute=1024)
    sizes, changes = adjust(asked, call(), "flash", Target.named(kind), training=False)
    assert changes and sizes != BlockSizes(4096, 1024, 1024)
    asked = FlashBlockSizes(block_q=3712, block_kv=1024, block_kv_compute=1024)
    assert adjust(asked, call(), "flash", Target.named(kind), training=False)[1] == ()


def test_2048_by_2048_keys_at_once_take_too_much_vmem_in_the_fused_backward():
    """libtpu 0.0.50.1 needs 34.8 MiB of 32, with ids, if the operands are in HBM."""
    side = 2048
    keys = dict.fromkeys((*FORWARD, *DKV), side)
    asked = FlashBlockSizes(**keys, use_fused_bwd_kernel=True)
    for kind in ("TPU v6e", "TPU v7x"):
        sizes, changes = adjust(asked, call(), "flash", Target.named(kind), training=True)
        assert changes and sizes.part(DKV) != (side, side, side)
    facts = facts_of(call(), "flash", Target.named("TPU v6e"), training=True)
    assert not fits("fused", (side, side, side), facts)
    assert fits("fused", (side, side, side // 2), facts)


def test_3024_is_kept_in_inference_and_mended_in_training():
    asked = FlashBlockSizes(block_q=3024, block_kv=512, block_kv_compute=512)
    assert adjust(asked, call(), "flash", CPU, training=False) == (BlockSizes(3024, 512, 512), ())
    sizes, changes = adjust(asked, call(), "flash", CPU, training=True)
    assert sizes.block_q == sizes.block_q_dkv == sizes.block_q_dq == 3072
    assert changes == (Change("block_q", 3024, 3072, "must be a multiple of 128"),)


def test_fused_drops_the_dq_sizes_and_block_q_wins():
    asked = FlashBlockSizes(
        block_q=1024, block_kv=512, block_q_dkv=512, block_q_dq=512, block_kv_dq=256,
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    sizes, changes = adjust(asked, call(), "flash", V5P, training=True)
    changed = {"block_q_dkv": 1024, "block_q_dq": None, "block_kv_dq": None}
    assert sizes.block_q == 1024 and {c.key: c.used for c in changes} == changed
    assert {key: getattr(sizes, key) for key in changed} == changed


@pytest.mark.parametrize(
    ("keys", "used"),
    [
        ({"block_kv": 1024, "block_kv_compute": 384}, {"block_kv": 1024, "block_kv_compute": 512}),
        ({"block_kv": 1000}, {"block_kv": 1024}),
        ({"block_kv": 130}, {"block_kv": 128}),
        ({"block_kv": 1}, {"block_kv": 128}),
        ({"block_q": 768, "block_q_dkv": 512}, {"block_q": 768, "block_q_dkv": 384}),
        ({"block_kv": 512, "block_kv_dkv": 1024}, {"block_kv": 512, "block_kv_dkv": 512}),
        ({"block_kv": 768, "block_kv_dq": 640}, {"block_kv": 768, "block_kv_dq": 768}),
    ],
)
def test_the_nearest_size_that_obeys(keys, used):
    sizes, _ = adjust(FlashBlockSizes(**keys), call(), "flash", V5P, training=True)
    assert {key: getattr(sizes, key) for key in used} == used


def test_nothing_asked_is_nothing_changed():
    sizes, changes = adjust(FlashBlockSizes(), call(), "flash", V5P, training=True)
    assert (sizes, changes) == (BlockSizes(512, 512, 512, 512, 512, 512, 512, 512, False), ())
    assert log_lines("self", changes) == ""


def test_sizes_that_are_set_choose_those_that_are_not():
    asked = FlashBlockSizes(block_q_dkv=384, block_q_dq=256, block_kv_compute=384)
    sizes, changes = adjust(asked, call(), "flash", V5P, training=True)
    assert (sizes.block_q, sizes.block_kv, changes) == (768, 768, ())


def test_vmem_limits_a_tpu_and_no_cpu():
    asked = FlashBlockSizes(block_q=2048, block_kv=4096, block_kv_compute=2048)
    assert adjust(asked, call(), "flash", CPU, training=False)[1] == ()
    sizes, changes = adjust(asked, call(), "flash", V5P, training=False)
    assert sizes.block_q * sizes.block_kv < 2048 * 4096
    assert {c.reason for c in changes} == {"16 MiB of VMEM on TPU v5p"}


def test_a_limit_of_vmem_that_the_user_set_is_the_limit(monkeypatch):
    asked = FlashBlockSizes(block_q=2048, block_kv=2048, block_kv_compute=1024)
    flags = "--xla_tpu_enable_async_all_to_all=true --xla_tpu_scoped_vmem_limit_kib=65536"
    for each, reasons in (
        (flags, set()),
        ("", {"16 MiB of VMEM on TPU v5p"}),
        (flags.replace("65536", "8192"), {"8 MiB of VMEM on TPU v5p"}),
    ):
        target = replace(V5P, env=(("LIBTPU_INIT_ARGS", each),))
        assert {c.reason for c in adjust(asked, call(), "flash", target, True)[1]} == reasons
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    assert ("LIBTPU_INIT_ARGS", flags) in Target.here().env


LARGE = dict(zip((*FORWARD, *DKV), (3024, 2048, 1024) * 2, strict=True))
LARGE = FlashBlockSizes(**LARGE, use_fused_bwd_kernel=True)
ODD = FlashBlockSizes(block_q=1000, block_kv=1000, block_kv_compute=300, block_q_dkv=300)
GOLDEN = {
    "cross_77": (uniform(512), call(32760, 77), "flash", True),
    "cross_333_tokamax": (uniform(512), call(32760, 333), "tokamax_flash", True),
    "self_3024_2048": (LARGE, call(), "flash", True),
    "self_tokamax": (uniform(1024), call(), "tokamax_flash", True),
    "self_odd": (ODD, call(), "flash", True),
    "self_short": (uniform(2048), call(1000), "flash", True),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_log_lines(name):
    asked, what, kernel, training = GOLDEN[name]
    sizes, changes = adjust(asked, what, kernel, V5P, training)
    check_golden(f"block_sizes/{name}", f"{log_lines(what.role, changes)}\n\nruns with {sizes}")


def published() -> list[list[str]]:
    """Read the rows: preset, file, kernel, chip, pass, two verdicts, maxattn's changes."""
    name = "tpu-published-tiles-2026-11-21.txt"
    text = (Path(__file__).parents[2] / "docs" / "measured" / name).read_text()
    rows = (line.strip("|").split("|") for line in text.splitlines())
    return [cells for row in rows if (cells := [x.strip() for x in row])[0] in PRESETS]


def test_what_others_publish_and_the_compiler_takes_is_not_changed():
    rows = [row for row in published() if len(row) == 8]
    assert {row[0] for row in rows} == set(PRESETS)
    for name, _, _, chip, phase, verdict, _, changes in rows:
        assert changes == changes_of(name, f"TPU {chip}", phase == "training")
        assert (changes == "none") == (verdict == "compiles")


def test_padding_above_a_tenth_is_a_note_in_the_plan():
    """Shards of 576 tokens (Flux over eight devices) are not a multiple of 128."""
    asked = {"block_q": 640, "block_kv": 640}
    config = ma.AttentionConfig(attention="ring", attention_kernel="flash", flash_block_sizes=asked)
    plan = ma.plan(ma.Call(1, 4608, 4608, 24, 24, 128, "bfloat16"), config, {"context": 8}, V5P)
    pads = "640 pads 576 tokens to 640 (11%); no multiple of 128 up to 1,280 pads less"
    notes = tuple(note for note in plan.notes if "pads" in note)
    assert notes == (f"block_q: {pads}", f"block_kv: {pads}")
