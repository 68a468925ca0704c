"""Plans for GPUs as golden files: kernels, gains from an extra, refusals."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.announce import announce
from maxattn.errors import Unsupported
from maxattn.tools.model_shapes import SHAPES, read
from tests.golden_text import check_golden, check_refused

EXTRAS = (("tokamax", "0.0.17"), ("fa4-jax", "0.1.0"), ("transformer-engine-jax", "2.20.2"))
H200 = ma.Target("gpu", "NVIDIA H200", EXTRAS)
BARE = ma.Target("gpu", "NVIDIA H200")
A100 = ma.Target("gpu", "NVIDIA A100", EXTRAS)
MI300X = ma.Target("gpu", "AMD Instinct MI300X", EXTRAS)
OLD_TOKAMAX = ma.Target("gpu", "NVIDIA H200", (("tokamax", "0.0.12"),))


V5P = ma.Target.named("TPU v5p")


def with_version(target: ma.Target, package: str, version: str) -> ma.Target:
    packages = dict(target.packages) | {package: version}
    return replace(target, packages=tuple(packages.items()))


def call(
    t: int = 4096, s: int | None = None, h: int = 64, dtype: str = "bfloat16", **rest
) -> ma.Call:
    shape = jax.ShapeDtypeStruct
    return ma.Call.of(shape((2, t, 8, h), dtype), shape((2, s or t, 8, h), dtype), **rest)


def segments(length: int) -> M.Mask:
    ids = np.repeat(np.arange(8, dtype=np.int32), length // 8)[None].repeat(2, 0)
    return M.Segments(ids, ids)


def plan(asked: str, target: ma.Target, call: ma.Call, mesh=None, **settings) -> ma.Plan:
    return ma.plan(call, ma.AttentionConfig(attention=asked, **settings), mesh, target)


EXPLAINED = {
    "auto_h200": lambda: plan("auto", H200, SHAPES["wan-14b-720p"].call()),
    "auto_pair": lambda: plan("auto", H200, read("2,4096,4096,8,256").call()),
    "auto_parts": lambda: plan("auto", H200, SHAPES["wan-1.3b-480p"].call()),
    "auto_cross": lambda: ma.plan(SHAPES["wan-cross"].call(), target=H200),
    "auto_cross_lengths": lambda: ma.plan(
        call(32760, 512, 128, mask=M.KeyPadding(np.array([60, 512])), role="cross"), target=H200
    ),
    "auto_segments": lambda: plan("auto", H200, call(mask=segments(4096))),
    "flash_causal_lengths": lambda: plan(
        "flash", H200, call(mask=M.Causal() & M.KeyPadding(np.array([900, 4096])))
    ),
    "auto_no_extras": lambda: plan("auto", BARE, SHAPES["wan-14b-720p"].call()),
    "auto_a100": lambda: plan("auto", A100, call()),
    "auto_amd": lambda: plan("auto", MI300X, SHAPES["wan-14b-720p"].call()),
    "auto_amd_ring": lambda: plan("auto", MI300X, SHAPES["wan-14b-720p"].call(), {"context": 4}),
    "ring_amd": lambda: plan(
        "dot_product", MI300X, call(), {"context": 4}, context_parallel="ring"
    ),
    "auto_jax_untested": lambda: plan("auto", with_version(BARE, "jax", "0.13.0"), call()),
    "auto_scale_below_0": lambda: plan("auto", H200, call(scale=-0.2)),
    "auto_float32": lambda: plan("auto", H200, call(dtype="float32")),
    "auto_head_dim_512": lambda: plan("auto", H200, call(h=512)),
    "auto_mask_of_pairs": lambda: plan("auto", H200, call(mask=M.Dense(TABLE))),
    "auto_block_window": lambda: plan("auto", H200, SHAPES["swba-1560x7"].call()),
    "flash_h200": lambda: plan("flash", H200, call(mask=M.Causal())),
    "flash_causal_gathered": lambda: plan(
        "flash", H200, call(mask=M.Causal()), {"context": 4}, context_parallel="all_gather"
    ),
    "flash_few_queries": lambda: plan("flash", H200, read("1,4680,32760,12,128").call()),
    "flash_few_causal_queries": lambda: plan("flash", H200, call(t=256, s=16384, mask=M.Causal())),
    "flash_no_extras": lambda: plan("flash", BARE, call()),
    "cudnn_lengths": lambda: plan("cudnn", BARE, call(mask=M.KeyPadding(np.array([9, 7])))),
    "ring_over_cudnn": lambda: plan(
        "cudnn", BARE, call(mask=M.Causal()), {"context": 4}, context_parallel="ring"
    ),
    "ring_over_flash": lambda: plan(
        "flash", H200, SHAPES["wan-14b-480p"].call(), {"context": 4}, context_parallel="ring"
    ),
    "te": lambda: plan("cudnn_flash_te", H200, call(s=77)),
    "tokamax": lambda: plan("tokamax_flash", H200, call(mask=M.BlockSlidingWindow(256, 4))),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain(name: str) -> None:
    check_golden(f"gpu/{name}", EXPLAINED[name]().explain())


TABLE = np.zeros((4096, 4096), bool)
REFUSED = {
    "scale_below_0": lambda: plan("cudnn", H200, call(scale=-0.2)),
    "scale_below_0_of_flash": lambda: plan("flash", H200, call(scale=-1.0)),
    "tokamax_float16": lambda: plan("tokamax_flash", H200, call(dtype="float16")),
    "te_missing": lambda: plan("cudnn_flash_te", BARE, call()),
    "tokamax_missing": lambda: plan("tokamax_flash", BARE, call()),
    "tokamax_old": lambda: plan("tokamax_flash", OLD_TOKAMAX, call()),
    "tokamax_a100": lambda: plan("tokamax_flash", A100, call()),
    "tokamax_two_intervals": lambda: plan(
        "tokamax_flash", H200, call(mask=M.Causal() | M.KeyLimit(3))
    ),
    "head_dim_512": lambda: plan("flash", H200, call(h=512)),
    "head_dim_512_cudnn": lambda: plan("cudnn", BARE, call(h=512)),
    "head_dim_256_a100": lambda: plan("cudnn", A100, call(h=256)),
    "float32": lambda: plan("cudnn", BARE, call(dtype="float32")),
    "te_block_window": lambda: plan(
        "cudnn_flash_te", H200, call(mask=M.BlockSlidingWindow(256, 4))
    ),
    "te_dense": lambda: plan("cudnn_flash_te", H200, call(mask=M.Dense(TABLE))),
    "te_flags_and_causal": lambda: plan(
        "cudnn_flash_te", H200, call(mask=M.Causal() & M.KeyPadding(np.ones((2, 4096), bool)))
    ),
    "flash_dense_no_extras": lambda: plan("flash", BARE, call(mask=M.Dense(TABLE))),
    "cudnn_two_sided": lambda: plan("cudnn", BARE, call(mask=M.LocalWindow(7, 3))),
    "cudnn_window_of_more_queries": lambda: plan(
        "cudnn", H200, call(512, 257, mask=M.LocalWindow(59, 0, offset=0))
    ),
    "cudnn_causal_gathered": lambda: plan(
        "cudnn", BARE, call(mask=M.Causal()), {"context": 4}, context_parallel="all_gather"
    ),
    "amd_flash": lambda: plan("flash", MI300X, call()),
    "amd_tokamax_flash": lambda: plan("tokamax_flash", MI300X, call()),
    "amd_cudnn": lambda: plan("cudnn", MI300X, call()),
    "amd_cudnn_flash_te": lambda: plan("cudnn_flash_te", MI300X, call()),
    "untested_cudnn": lambda: plan("cudnn", with_version(BARE, "jax", "0.13.0"), call()),
    "untested_fa4": lambda: plan("flash", with_version(H200, "fa4-jax", "0.2.0"), call()),
    "untested_tokamax": lambda: plan(
        "tokamax_flash", with_version(H200, "tokamax", "0.0.18"), call()
    ),
    "untested_te": lambda: plan(
        "cudnn_flash_te", with_version(H200, "transformer-engine-jax", "3.0.1"), call()
    ),
    "untested_splash": lambda: plan("flash", with_version(V5P, "jax", "0.13.0"), call()),
    "untested_tokamax_splash": lambda: plan(
        "tokamax_flash", with_version(V5P, "tokamax", "0.0.11"), call()
    ),
    "deterministic": lambda: plan("cudnn", BARE, call(), deterministic=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    check_refused(f"gpu/refused_{name}", Unsupported, REFUSED[name])


def test_deterministic_auto_takes_a_kernel_that_repeats() -> None:
    decided = plan("auto", H200, call(), deterministic=True)
    assert decided.kernel.name == "tokamax_flash"
    assert any("no fixed order" in str(r) for r in decided.refused)


# ---- calls with a bias ---------------------------------------------------------------------------

OLD = ma.Target("gpu", "NVIDIA H200", (("nvidia-cudnn-cu13", "9.10.2"),))
LENGTHS = M.KeyPadding(np.array([9, 7]))
LONG = 200_000


def biased(
    bias: tuple[int, ...] = (2, 8, 4096, 4096), dtype: str = "bfloat16", **rest: Any
) -> ma.Call:
    return call(bias=jax.ShapeDtypeStruct(bias, dtype), **rest)


BIASED = {
    "auto": lambda: plan("auto", H200, biased()),
    "auto_float32": lambda: plan("auto", H200, biased(dtype="float32")),
    "auto_float32_no_extras": lambda: plan("auto", BARE, biased(dtype="float32")),
    "auto_of_keys": lambda: plan("auto", BARE, biased((2, 1, 1, 4096))),
    "auto_learned": lambda: plan("auto", BARE, biased((1, 8, 4096, 4096), mask=LENGTHS)),
    "auto_table": lambda: plan(
        "auto", BARE, biased((1, 1, 4096, 4096), mask=M.Dense(np.ones((2, 1, 4096, 4096), bool)))
    ),
    "auto_head_dim": lambda: plan("auto", H200, biased(h=192)),
    "auto_amd": lambda: plan("auto", MI300X, biased()),
    "auto_ring": lambda: plan(
        "auto", BARE, biased(), {"context": 4, "tensor": 2}, context_parallel="ring"
    ),
    "flash": lambda: plan("flash", H200, biased((1, 8, 4096, 4096), "float32", mask=M.Causal())),
    "flash_no_extras": lambda: plan("flash", BARE, biased()),
    "te": lambda: plan("cudnn_flash_te", H200, biased()),
}
REFUSED_BIASED = {
    "cudnn_float32": lambda: plan("cudnn", H200, biased(dtype="float32")),
    "te_float16": lambda: plan("cudnn_flash_te", H200, biased(dtype="float16")),
    "cudnn_head_dim": lambda: plan("cudnn", H200, biased(h=192)),
    "cudnn_old": lambda: plan("cudnn", OLD, biased()),
    "cudnn_written_out": lambda: plan("cudnn", BARE, biased((2, 1, 1, LONG), t=LONG)),
    "flash_a100": lambda: plan("flash", A100, biased()),
    "flash_written_out": lambda: plan("flash", H200, biased((1, 1, 1, LONG), "float32", t=LONG)),
    "tokamax": lambda: plan("tokamax_flash", H200, biased()),
}


@pytest.mark.parametrize("name", REFUSED_BIASED)
def test_a_bias_is_refused(name: str) -> None:
    check_refused(f"gpu_bias/refused_{name}", Unsupported, REFUSED_BIASED[name])


@pytest.mark.parametrize("name", BIASED)
def test_plans_of_a_bias_warn_of_plain_jax(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The warning tells why the kernels of an NVIDIA GPU cannot run."""
    decided = replace(BIASED[name](), asked=f"attention: auto ({name})")
    check_golden(f"gpu_bias/{name}", BIASED[name]().explain())
    with caplog.at_level(logging.INFO, "maxattn"):
        announce(decided)
    (record,) = caplog.records
    slow = name in ("auto_float32_no_extras", "auto_head_dim")
    assert record.levelno == (logging.WARNING if slow else logging.INFO)
    assert not slow or "cudnn: " in record.getMessage()


def test_a_bias_has_the_dtype_of_the_call_where_none_is_said() -> None:
    made = ma.Call(2, 64, 64, 8, 8, 64, "bfloat16", bias=(1, 1, 64, 64))
    assert made.bias_dtype == "bfloat16"
    assert ma.Call(2, 64, 64, 8, 8, 64).bias_dtype == ""
    assert replace(made, bias_dtype="float32").bias_dtype == "float32"
