"""TPU kernels together: the forward of one and the backward of another, and two cores."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn._attention import run
from maxattn.block_sizes import DKV, FORWARD, BlockSizes
from maxattn.kernels import build
from maxattn.kernels.composed.pair import Pair, kernels_of
from maxattn.target import Target
from maxattn.tools.memory import estimate
from tests.cases import draw_operands, judge_call
from tests.waiting import but

SMALL = {"block_q": 128, "block_kv": 128}
CONFIG = ma.AttentionConfig(attention="flash", flash_block_sizes=SMALL)
B, T, N, K, H = 2, 260, 4, 2, 32
MASKS = {
    "full": M.Full(),
    "window": M.LocalWindow(60, 20),
    "causal & lengths": M.Causal() & M.KeyPadding(np.array([150, 260], np.int32)),
    "segments": M.Segments.of_lengths((100, 30, 130)),
}


def check(name: str, mask: M.Mask, mesh: Any = None, head_dim_v: int = H) -> None:
    """Run both passes of a pair, with a gradient of the LSE, and compare them with float64."""
    x = draw_operands(B, T, T, N, K, H, head_dim_v)
    bound = mask.bind(T, T, B, N)
    call = ma.Call(B, T, T, N, K, H, "float32", bound.form(), value_head_dim=head_dim_v % H)
    config = CONFIG.replace(context_parallel="ring", fallback="error") if mesh else CONFIG
    plan = ma.plan(call, config, dict(mesh.shape) if mesh else None, Target.named("cpu"))
    local = plan.strategy.kernel_call(plan.strategy.local_call(plan.padded_call))
    plan = replace(plan, kernel=build(name, local, CONFIG, plan.target))
    judge_call(partial(run, plan, bias=None, mask=bound, mesh=mesh), x, mask)


PAIRS = ["flash/tpu_flash", "tpu_flash/flash"]
# Each pass meets every mask in the tests of its own kernel: here each pair meets one.
MET = [(PAIRS[0], "causal & lengths"), (PAIRS[1], "window")]


@pytest.mark.parametrize(("name", "mask"), but(product(PAIRS, MASKS), MET))
def test_a_pair_is_exact(name: str, mask: str) -> None:
    check(name, MASKS[mask])


def test_values_of_another_head_dim() -> None:
    check("flash/tpu_flash", M.Causal(), head_dim_v=16)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["full", "window"])
def test_a_pair_goes_round_a_ring(mask: str) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("context",))
    check("flash/tpu_flash", MASKS[mask], mesh)


# ---- what plans say of it ------------------------------------------------------------------------

V5P = Target.named("TPU v5p")
WAN = ma.Call(1, 75_600, 75_600, 40, 40, 128, "bfloat16")


def test_a_forward_is_bound_by_its_own_rules_alone() -> None:
    pair = ma.plan(WAN, ma.AttentionConfig(), None, V5P).kernel
    assert isinstance(pair, Pair) and pair.name == "flash/tpu_flash" and pair.is_pallas
    flash, own = (build(n, WAN, ma.AttentionConfig(), V5P) for n in ("flash", "tpu_flash"))
    assert pair.for_inference() == flash.for_inference()
    for kernel, keys in ((flash.for_inference(), FORWARD), (own, DKV)):
        assert isinstance(pair.blocks, BlockSizes) and isinstance(kernel.blocks, BlockSizes)
        assert pair.blocks.part(keys) == kernel.blocks.part(keys)
    assert [kernel.name for kernel in kernels_of(pair)] == ["flash", "tpu_flash"]


def test_its_changes_are_of_sizes_that_run_and_its_memory_is_its_backwards() -> None:
    asked = {"block_q": 1000, "block_q_dkv": 1000, "block_kv_dkv": 1000}
    config = ma.AttentionConfig(flash_block_sizes=asked)
    pair = build("flash/tpu_flash", WAN, config, V5P)
    first, second = ([c.key for c in kernel.changes] for kernel in kernels_of(pair))
    own = {key for key in first if key in FORWARD} | {key for key in second if key not in FORWARD}
    assert {change.key for change in pair.changes} == own >= {"block_q_dkv"}
    plans = (
        ma.plan(WAN, ma.AttentionConfig(attention=x), None, V5P) for x in ("auto", "tpu_flash")
    )
    named = [[part.what for part in estimate(plan, True)] for plan in plans]
    assert named[0] == named[1]


# ---- two cores: heads become batch rows of a backward --------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "flash": {"attention": "flash"},
    "flash fused": {"attention": "flash", "flash_block_sizes": {"use_fused_bwd_kernel": True}},
    "tokamax_flash": {"attention": "tokamax_flash"},
}
# A mask, shared heads, a batch, and heads alone.
LENGTHS = M.KeyPadding(np.array([150, 90, 201], np.int32))
CASES = [
    (1, 4, 4, M.BlockSlidingWindow(24, 3)), (1, 4, 2, M.Full()), (3, 2, 2, LENGTHS),
    (1, 2, 1, M.Full()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"), but(product(SETTINGS, CASES), lambda x: x == ("flash fused", CASES[0]))
)
def test_a_backward_over_two_cores(name: str, case: tuple[int, int, int, M.Mask]) -> None:
    if name == "tokamax_flash":
        pytest.importorskip("tokamax")
    batch, heads, kv_heads, mask = case
    x, config = draw_operands(batch, 201, 201, heads, kv_heads, 64), SETTINGS[name]
    bound, packages = mask.bind(201, 201, batch, heads), (("tokamax", "0.0.17"),)
    call = ma.Call.of(x["q"], x["k"], bound, return_lse=True)
    cores = {}
    for kind in ("cpu", "TPU v6e", "TPU v5p"):
        target = ma.Target.named(kind, packages)
        plan = ma.plan(call, ma.AttentionConfig(**config), target=target)
        cores[kind] = plan.kernel.cores  # type: ignore[attr-defined]
    assert cores == {"cpu": 1, "TPU v6e": 1, "TPU v5p": 2}
    plan = ma.plan(call, ma.AttentionConfig(**config), target=ma.Target.named("cpu", packages))
    plan = replace(plan, kernel=replace(plan.kernel, cores=2))  # type: ignore[call-arg]
    judge_call(partial(run, plan, bias=None, mask=bound, mesh=None), x, mask)
