"""What is timed: sizes that the rules leave as they are, and kernels that can run."""

from __future__ import annotations

from dataclasses import replace

import pytest

import maxattn as ma
from maxattn.block_sizes import adjust
from maxattn.config import FlashBlockSizes
from maxattn.masks import BlockSlidingWindow
from maxattn.target import Target
from maxattn.tools.model_shapes import changed, read
from maxattn.tools.tune.candidates import candidates, kernel_candidates
from tests.golden_text import check_golden


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kernel", ["flash", "tokamax_flash"])
def test_candidates_are_what_the_rules_leave_as_it_is(kernel, training):
    call, target = read("wan-14b-cross").call(), Target.named("TPU v6e")
    found = candidates(kernel, call, target, training, 30)
    default, _ = adjust(FlashBlockSizes(), call, kernel, target, training)
    assert (
        dict(found[0].sizes) == default.given()
        and len({c.sizes for c in found}) == len(found) == 30
    )
    for candidate in found:
        sizes, changes = adjust(
            FlashBlockSizes(**dict(candidate.sizes)), call, kernel, target, training
        )
        assert not changes and sizes.given() == dict(candidate.sizes)
    assert [c.cost for c in found[1:]] == sorted(c.cost for c in found[1:])


def test_candidates_fit_the_memory():
    """At 75,600 tokens and 40 heads the fused backward of 2048 keys a tile writes 27 GiB of parts
    of dQ.
    """
    found = candidates("flash", read("wan-14b-720p").call(), Target.named("TPU v6e"), True, 500)
    fused = [dict(c.sizes) for c in found if dict(c.sizes)["use_fused_bwd_kernel"]]
    assert all(sizes["block_kv_dkv"] > 2048 for sizes in fused)
    assert [
        c
        for c in candidates(
            "flash", read("wan-14b-720p").call(), Target.named("TPU v5p"), True, 500
        )
        if dict(c.sizes)["use_fused_bwd_kernel"]
    ]


def test_steps_under_a_mask_are_those_that_are_visited():
    plain = changed(read("1,2048,2048,2,64"), None, None, None, None)
    window = replace(plain, mask=BlockSlidingWindow(256, 2))
    by_sizes = {
        c.sizes: c for c in candidates("flash", plain.call(), Target.named("TPU v6e"), False, 500)
    }
    for candidate in candidates("flash", window.call(), Target.named("TPU v6e"), False, 20):
        assert candidate.steps <= by_sizes[candidate.sizes].steps
    (small,) = (
        c
        for c in candidates("flash", window.call(), Target.named("TPU v6e"), False, 500)
        if dict(c.sizes) == {"block_q": 256, "block_kv": 256, "block_kv_compute": 256}
    )
    assert small.steps == 8 + 7  # eight blocks see themselves, seven the one before


def test_what_is_timed_on_an_h200():
    extras = ("fa4-jax", "0.1.0"), ("tokamax", "0.0.17"), ("transformer-engine-jax", "2.20.2")
    texts = []
    for text, packages in (
        ("64,256,256,16,72", extras),
        ("wan-1.3b-480p", extras[:1]),
        ("wan-cross", ()),
        ("sdxl-64", extras),
    ):
        target = Target.named("NVIDIA H200", packages)
        found = kernel_candidates(read(text).call(), ma.AttentionConfig(), target)
        left_out = [f"\n  {name}: {why}" for name, why in found.left_out.items()]
        texts.append(f"{text}: {', '.join(found.built)}{''.join(left_out)}")
    check_golden("cli/tune/kernels_that_are_timed", "\n".join(texts))
