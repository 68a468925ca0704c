"""Plans of calls with a bias on GPUs, made anywhere: what runs, what it takes, refusals."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.announce import announce
from maxattn.errors import Unsupported
from tests.golden_text import check_golden, check_refused

EXTRAS = (("tokamax", "0.0.17"), ("fa4-jax", "0.1.0"), ("transformer-engine-jax", "2.20.2"))
H200, A100 = (ma.Target("gpu", f"NVIDIA {name}", EXTRAS) for name in ("H200", "A100"))
BARE, MI300X = ma.Target("gpu", "NVIDIA H200"), ma.Target("gpu", "AMD Instinct MI300X", EXTRAS)
OLD = ma.Target("gpu", "NVIDIA H200", (("nvidia-cudnn-cu13", "9.10.2"),))
FULL = (2, 8, 4096, 4096)


def call(
    bias: tuple[int, ...] = FULL, dtype: str = "bfloat16", h: int = 64, t: int = 4096, **rest
) -> ma.Call:
    q = jax.ShapeDtypeStruct((2, t, 8, h), "bfloat16")
    return ma.Call.of(q, q, bias=jax.ShapeDtypeStruct(bias, dtype), **rest)


def plan(asked: str, target: ma.Target, call: ma.Call, mesh=None, **settings) -> ma.Plan:
    return ma.plan(call, ma.AttentionConfig(attention=asked, **settings), mesh, target)


LENGTHS = M.KeyPadding(np.array([9, 7]))
EXPLAINED = {
    "auto": lambda: plan("auto", H200, call()),
    "auto_float32": lambda: plan("auto", H200, call(dtype="float32")),
    "auto_float32_no_extras": lambda: plan("auto", BARE, call(dtype="float32")),
    "auto_of_keys": lambda: plan("auto", BARE, call((2, 1, 1, 4096))),
    "auto_learned": lambda: plan("auto", BARE, call((1, 8, 4096, 4096), mask=LENGTHS)),
    "auto_table": lambda: plan(
        "auto", BARE, call((1, 1, 4096, 4096), mask=M.Dense(np.ones((2, 1, 4096, 4096), bool)))
    ),
    "auto_head_dim": lambda: plan("auto", H200, call(h=192)),
    "auto_amd": lambda: plan("auto", MI300X, call()),
    "auto_ring": lambda: plan(
        "auto", BARE, call(), {"context": 4, "tensor": 2}, context_parallel="ring"
    ),
    "flash": lambda: plan("flash", H200, call((1, 8, 4096, 4096), "float32", mask=M.Causal())),
    "flash_no_extras": lambda: plan("flash", BARE, call()),
    "te": lambda: plan("cudnn_flash_te", H200, call()),
}
LONG = 200_000
REFUSED = {
    "cudnn_float32": lambda: plan("cudnn", H200, call(dtype="float32")),
    "te_float16": lambda: plan("cudnn_flash_te", H200, call(dtype="float16")),
    "cudnn_head_dim": lambda: plan("cudnn", H200, call(h=192)),
    "cudnn_old": lambda: plan("cudnn", OLD, call()),
    "cudnn_written_out": lambda: plan("cudnn", BARE, call((2, 1, 1, LONG), t=LONG)),
    "flash_a100": lambda: plan("flash", A100, call()),
    "flash_written_out": lambda: plan("flash", H200, call((1, 1, 1, LONG), "float32", t=LONG)),
    "tokamax": lambda: plan("tokamax_flash", H200, call()),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain(name: str) -> None:
    check_golden(f"gpu_bias/{name}", EXPLAINED[name]().explain())


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    check_refused(f"gpu_bias/refused_{name}", Unsupported, REFUSED[name])


@pytest.mark.parametrize("name", EXPLAINED)
def test_plain_jax_is_taken_with_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning says what keeps the kernels of an NVIDIA GPU out."""
    decided = replace(EXPLAINED[name](), asked=f"attention: auto ({name})")
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
