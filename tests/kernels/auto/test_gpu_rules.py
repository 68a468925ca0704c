"""Choices of `auto` on untuned NVIDIA GPUs: its rules, and their distance from the fastest."""

from __future__ import annotations

from dataclasses import replace

import grid
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.auto import gpu
from maxattn.kernels.auto.choose import choose_kernel, order
from maxattn.tools.model_shapes import SHAPES, read
from tests.gpu.test_hardware_plans import CUDNN_913, FA4, TE, WAN, chosen, named

ALL = (*FA4, TE, ("tokamax", "0.0.17"))
WIDE = read("2,4096,4096,8,256").call()
IDS = np.repeat(np.arange(4, dtype=np.int32), 32)[None]


H200 = named("H200", *ALL)


def masked(call: ma.Call, mask: M.Mask) -> ma.Call:
    return replace(call, mask=mask.bind(call.q_len, call.kv_len, call.batch, call.heads).form())


# ---- Hopper --------------------------------------------------------------------------------------


def test_flash_is_what_a_hopper_gpu_runs() -> None:
    for shape in SHAPES.values():
        assert chosen(H200, shape.call()) == ("flash", gpu.FLASH)


@pytest.mark.parametrize(
    ("call", "is_wide"),
    [
        (WIDE, True),
        (masked(WIDE, M.Causal()), True),
        (masked(WIDE, M.LocalWindow(1000, 0)), True),
        (masked(WIDE, M.KeyPadding(np.array([9, 4096]))), True),
        (replace(WIDE, head_dim=200, scale=0.0), True),
        (replace(WIDE, head_dim=192, scale=0.0), False),
        (replace(WIDE, kv_len=1023), False),
        (replace(WIDE, kv_heads=4), False),
        (masked(WIDE, M.BlockSlidingWindow(1000, 2)), False),
        (masked(WIDE, M.Segments(*[np.zeros((2, 4096), np.int32)] * 2)), False),
    ],
)
def test_the_backward_of_long_wide_heads_is_another_s(call: ma.Call, is_wide: bool) -> None:
    for packages, backward in ((ALL, "cudnn_flash_te"), (FA4, "cudnn")):
        tried = [name for name, _ in order(call, named("H200", *packages))]
        assert (f"flash/{backward}" in tried) == is_wide
    assert chosen(H200, call)[0] == ("flash/cudnn_flash_te" if is_wide else "flash")


@pytest.mark.parametrize(
    ("sizes", "mask", "is_dense"),
    [
        ((8, 128, 128, 2), M.Segments(IDS, IDS), True),
        ((8, 128, 128, 4), M.Segments(IDS, IDS), False),  # 524,288 scores
        ((8, 128, 128, 2), M.Causal(), False),
        ((1, 256, 128, 2), M.Segments(np.repeat(IDS, 2, 1), IDS), False),
    ],
)
def test_few_scores_of_segments_are_dense_forward(sizes: tuple, mask: M.Mask, is_dense: bool):
    b, t, s, n = sizes
    if isinstance(mask, M.Segments):
        mask = M.Segments(*(np.repeat(x, b, 0) for x in (mask.q_ids, mask.kv_ids)))
    call = masked(ma.Call(b, t, s, n, n, 64, "bfloat16"), mask)
    assert chosen(H200, call)[0] == ("dot_product/flash" if is_dense else "flash")


def test_without_flash_the_others_run_and_it_says_what_flash_would_bring() -> None:
    name, because = chosen(named("H200", TE))
    assert name == "cudnn_flash_te" and "flash would be faster: add --with fa4-jax" in because
    bare = choose_kernel(WAN, named("H200"))
    assert bare.name == "cudnn" and [reason.who for reason in bare.refused] == ["cudnn_flash_te"]


def test_what_no_fused_kernel_takes_is_plain_jax_and_says_why() -> None:
    pairs = M.Dense(np.zeros((4096, 4096), bool)).bind(4096, 4096)
    choice = choose_kernel(ma.Call(2, 4096, 4096, 8, 8, 64, "bfloat16", pairs), H200)
    assert choice.name == "dot_product" and [r.who for r in choice.refused] == ["flash"]
    assert choice.because.startswith("plain JAX, since no fused kernel takes this call; dense")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["H100", "MI300X", "TPU v5p"])
def test_float32_on_a_gpu_warns_and_says_what_to_write(device: str, dtype: str):
    warns = (device, dtype) == ("H100", "float32")
    choice = choose_kernel(ma.Call(1, 4096, 4096, 8, 8, 64, dtype), ma.Target.named(device))
    assert (choice.warns, "give modules dtype=jnp.bfloat16" in choice.because) == (warns, warns)


def test_other_hopper_gpus_say_that_nobody_measured_them() -> None:
    sxm = ma.Target("gpu", "NVIDIA H100 80GB HBM3", FA4)
    for target in (sxm, named("H100", *FA4), H200):
        assert gpu.is_measured_on(target) and chosen(target)[1] == gpu.FLASH
    for kind in ("NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "NVIDIA H20"):
        target = replace(sxm, device_kind=kind)
        assert not gpu.is_measured_on(target)
        assert chosen(target) == ("flash", f"{gpu.FLASH}; not measured on {kind}")


def test_the_rules_are_near_the_fastest_of_what_was_measured() -> None:
    """Total time relative to the fastest kernels', over 1,520 calls; always flash gives 1.0082."""
    text = grid.report(grid.judged(grid.read_files(grid.MEASURED)))
    assert "flash is the fastest in 2,861 of 3,040 passes" in text and "2,861 of 3,040" in gpu.FLASH
    assert "flash always: all time over that of the fastest 1.0082" in text
    assert "auto: all time over that of the fastest 1.0010" in text
    later = [grid.TREE / "docs/measured/h100-grid-fresh-seeds-2026-11-26.json"]
    text = grid.report(grid.judged(grid.read_files(later)))  # no rule is of these
    assert "fastest 1.0036" in text and "auto: all time over that of the fastest 1.0007" in text


# ---- other GPUs ----------------------------------------------------------------------------------


def test_what_others_published_is_said_to_be_theirs() -> None:
    """It holds for calls as theirs; elsewhere the rule does."""
    for cudnn in ((), (("nvidia-cudnn-cu13", "9.22"),)):
        name, because = chosen(named("B200", *FA4, *cudnn), WAN)
        assert name == "cudnn" and "SGLang" in because
        assert "published" in because and "not measured by maxattn here" in because
    others = [{"head_dim": 64, "scale": 0.0}, {"kv_len": 512}, {"dtype": "float16"}]
    calls = [replace(WAN, **other) for other in others]
    for call in (*calls, masked(WAN, M.Causal()), masked(WAN, M.KeyPadding(np.array([9])))):
        assert chosen(named("B200", *FA4), call) == ("cudnn", gpu.RULE)


@pytest.mark.parametrize("kind", ["B300", "A100", "RTX 5090"])
def test_other_gpus_and_versions_go_by_the_rule(kind: str) -> None:
    assert chosen(named(kind, *FA4)) == ("cudnn", gpu.RULE)
    assert chosen(named("B200", *FA4, CUDNN_913)) == ("cudnn", gpu.RULE)
