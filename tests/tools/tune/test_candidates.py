"""Candidates are sizes that the rules leave as they are; the timing runs what attention does."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.kernels import KERNELS
from maxattn.masks import BlockSlidingWindow
from maxattn.target import Target
from maxattn.tools.model_shapes import changed, read
from maxattn.tools.tune.candidates import candidates
from maxattn.tools.tune.measure import milliseconds
from tests.tools.tune.small import CONFIG


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kernel", ["flash", "tokamax_flash"])
def test_candidates_are_what_the_rules_leave_as_it_is(kernel, training):
    from maxattn.block_sizes import adjust
    from maxattn.config import FlashBlockSizes

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


@pytest.mark.parametrize("training", [True, False])
def test_the_timing_runs_a_tpu_kernel_in_interpret_mode(training):
    call = changed(read("1,128,128,1,64"), None, "f32", None, None).call()
    kernel = KERNELS["flash"].build(
        call, ma.AttentionConfig(attention="flash"), Target.named("cpu")
    )
    assert milliseconds(kernel, call, training) > 0


def test_the_timing_computes_what_attention_does():
    from maxattn.tools.tune.measure import _program

    call = changed(read("1,96,64,4,8,2"), None, "f32", None, None).call()
    kernel = KERNELS["memory_efficient"].build(call, CONFIG, Target.here())
    step, (q, k, v, dout) = _program(kernel, call, training=True)
    out, (dq, dk, dv) = step(q, k, v, dout)
    want, pull = jax.vjp(
        lambda q, k, v: ma.attention(q, k, v, config=CONFIG, role="cross"), q, k, v
    )
    for got, expected in zip((out, dq, dk, dv), (want, *pull(dout)), strict=True):
        np.testing.assert_allclose(jnp.asarray(got), expected, atol=2e-5)
