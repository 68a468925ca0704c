"""Tuning candidates: sizes that the rules do not change, and kernels that can run."""

from __future__ import annotations

from dataclasses import replace

import pytest

import maxattn as ma
from maxattn.block_sizes import adjust
from maxattn.config import FlashBlockSizes
from maxattn.masks import BlockSlidingWindow
from maxattn.target import Target
from maxattn.tools.model_shapes import read
from maxattn.tools.tune.candidates import candidates, cost_of, kernel_candidates
from tests.golden_text import check_golden

V6E, V5P = (Target.named(f"TPU {name}") for name in ("v6e", "v5p"))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kernel", ["flash", "tokamax_flash"])
def test_candidates_are_what_the_rules_leave_as_it_is(kernel, training):
    call = read("wan-14b-cross").call()
    found = candidates(kernel, call, V6E, training, 30)
    default, _ = adjust(FlashBlockSizes(), call, kernel, V6E, training)
    assert dict(found[0]) == default.given() and len({*found}) == len(found) == 30
    for given in map(dict, found):
        sizes, changes = adjust(FlashBlockSizes(**given), call, kernel, V6E, training)
        assert not changes and sizes.given() == given
    costs = [cost_of(sizes, call) for sizes in found[1:]]
    assert costs == sorted(costs)


def test_candidates_fit_the_memory():
    """At 75,600 tokens and 40 heads the fused backward with 2048 keys per tile needs 27 GiB."""

    def fused(target: Target) -> list[dict[str, int]]:
        found = candidates("flash", read("wan-14b-720p").call(), target, True, 500)
        return [sizes for sizes in map(dict, found) if sizes["use_fused_bwd_kernel"]]

    assert all(sizes["block_kv_dkv"] > 2048 for sizes in fused(V6E)) and fused(V5P)


def test_steps_under_a_mask_are_those_that_are_visited():
    """Eight blocks visit themselves, and seven the block before."""
    call = replace(read("1,2048,2048,2,64"), mask=BlockSlidingWindow(256, 2)).call()
    sizes = ("block_q", 256), ("block_kv", 256), ("block_kv_compute", 256)
    assert cost_of(sizes, call)[1] == 8 + 7


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
