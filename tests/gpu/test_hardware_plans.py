"""Plans for each generation of GPUs, made on any machine: kernels and refusals."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import Unsupported
from maxattn.jax_private.versions import aiter_in_jax
from maxattn.kernels import KERNELS, refusal
from maxattn.kernels.auto.choose import choose_kernel
from maxattn.tools.model_shapes import SHAPES
from tests.golden_text import check_golden
from tests.gpu.requirements import skip_unless_available

FA4 = (("fa4-jax", "0.1.0"),)
WAN, WINDOW = SHAPES["wan-14b-480p"].call(), SHAPES["swba-1560x7"].call()
HEADS_256 = ma.Call(2, 4096, 4096, 8, 8, 256, "bfloat16")


def named(kind: str, *packages: tuple[str, str]) -> ma.Target:
    return ma.Target.named(kind, packages)


def plan(asked: str, target: ma.Target, call: ma.Call, mesh: Any = None, **settings: Any) -> str:
    config = ma.AttentionConfig(attention=asked, **settings)
    try:
        return ma.plan(call, config, mesh, target).explain()
    except Unsupported as refused:
        return str(refused)


KINDS = ("A100", "H100", "B200", "GB200", "B300", "GB300", "RTX 5090", "RTX PRO 6000")
UNKNOWN = {
    "compute capability 11": ma.Target("gpu", "NVIDIA Thor", FA4, capability="11.0"),
    "Tesla T4": ma.Target("gpu", "Tesla T4", FA4),
}
MACHINES = {kind: named(kind, *FA4) for kind in KINDS} | UNKNOWN


@pytest.mark.parametrize("kind", MACHINES)
def test_plans_of_a_machine(kind: str) -> None:
    """Wan's attention, a block window and heads of 256, by `auto` and by `flash`."""
    target = MACHINES[kind]
    asked = [(a, call) for call in (WAN, WINDOW, HEADS_256) for a in ("auto", "flash")]
    text = "\n".join(plan(name, target, call) for name, call in asked)
    check_golden(f"hardware/{kind.replace(' ', '_')}", text)


OTHERS = {
    "b200_old_cudnn": lambda: plan("auto", named("B200", *FA4, CUDNN_913), WAN),
    "b200_old_cudnn_no_fa4": lambda: plan("auto", named("B200", CUDNN_913), WAN),
    "b200_no_fa4_flash": lambda: plan("flash", named("B200"), WAN),
    "b200_block_window_ring": lambda: plan(
        "flash", named("B200", *FA4), WINDOW, {"context": 4}, context_parallel="ring"
    ),
    "b300_old_cudnn": lambda: plan("cudnn", named("B300", ("nvidia-cudnn-cu13", "9.10.2")), WAN),
    "b200_head_dim_256_te": lambda: plan("cudnn_flash_te", named("B200", TE), HEADS_256),
    "amd_aiter": lambda: plan("auto", named("MI300X", ("aiter", "in jax")), WAN),
}
CUDNN_913 = ("nvidia-cudnn-cu12", "9.13.1")
TE = ("transformer-engine-jax", "2.20.2")


@pytest.mark.parametrize("name", OTHERS)
def test_other_plans(name: str) -> None:
    check_golden(f"hardware/{name}", OTHERS[name]())


@pytest.mark.gpu
def test_the_compute_capability_is_what_jax_says() -> None:
    skip_unless_available("cudnn")
    here = ma.Target.here()
    assert here.capability == here.device.capability_text == jax.devices()[0].compute_capability
    assert here.device == ma.Target("gpu", here.device_kind).device


# ---- AMD -----------------------------------------------------------------------------------------


def chosen(target: ma.Target, call: ma.Call = WAN) -> tuple[str, str]:
    choice = choose_kernel(call, target)
    return choice.name, choice.because


NVIDIA_S = ("flash", "tokamax_flash", "cudnn", "cudnn_flash_te")
PLAIN_AND_TPU = "dot_product", "memory_efficient", "tpu_flash", "tpu_few_keys"
CALLS = (WAN, WINDOW, HEADS_256, replace(WAN, dtype="float32"), replace(WAN, kv_len=77))


@pytest.mark.parametrize("kind", ["AMD Instinct MI300X", "AMD Radeon RX 7900 XTX", "AMD Graphics"])
def test_amd_gpus_run_plain_jax_and_the_plan_says_so(kind: str) -> None:
    target = ma.Target("gpu", kind, (*FA4, TE, ("tokamax", "0.0.17")))
    assert {*NVIDIA_S} | {*PLAIN_AND_TPU} == {*KERNELS}
    for call in CALLS:
        for kernel in NVIDIA_S:
            reason = refusal(kernel, call, target)
            assert reason is not None and reason.feature == "platform" and kind in reason.rule
        name, because = chosen(target, call)
        assert name in ("dot_product", "memory_efficient")
        assert because.startswith("plain JAX, since maxattn's fused kernels are for NVIDIA GPUs")
        assert "AITER" not in because
        with_aiter = replace(target, packages=(*target.packages, ("aiter", "in jax")))
        assert "AITER" in chosen(with_aiter, call)[1]


def test_aiter_is_found_where_jax_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert aiter_in_jax() == ()  # jax's own builds do not have it
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").touch()
    inside = import_module("jax._src")
    monkeypatch.setattr(inside, "__path__", [*inside.__path__, str(tmp_path)])
    assert aiter_in_jax() == (("aiter", "in jax"),)


@pytest.mark.parametrize("kernel", ["cudnn", "cudnn_flash_te"])
def test_cudnn_refuses_one_query_with_one_key(kernel: str) -> None:
    """cuDNN fails at run time for one query with one key, but not for longer ones."""
    target = ma.Target.named("NVIDIA H200", (*FA4, TE))
    short = replace(WAN, q_len=1, kv_len=1)
    reason = refusal(kernel, short, target)
    assert reason is not None and "one query and one key" in reason.rule
    assert refusal(kernel, replace(short, kv_len=2), target) is None
    assert choose_kernel(short, target).name not in ("cudnn", "cudnn_flash_te")


# ---- FlashAttention-4 and 32 bits: operands may be larger, and the sums of a backward may not ----

HOPPER, BLACKWELL = named("H200", *FA4), named("B200", *FA4)


def flash(batch: int, length: int, head_dim: int, target: ma.Target, **more: Any) -> str:
    call = ma.Call(batch, length, length, 8, 8, head_dim, "bfloat16", **more)
    return ma.plan(call, ma.AttentionConfig(attention="flash"), None, target).kernel.name


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL])
def test_operands_of_more_than_2_to_the_31_elements_run(target: ma.Target) -> None:
    """Strides are 64 bits: 2**33 elements are more than 32 bits count."""
    assert flash(8, 2**20, 128, target) == flash(1, 2**23, 128, target) == "flash"


LENGTHS = M.KeyPadding(np.full(2, 5)).form()


@pytest.mark.parametrize(
    ("target", "head_dim", "width", "mask"),
    [
        *((HOPPER, h, width, M.Full()) for h, width in ((64, 64), (160, 192), (256, 256))),
        *((target, 128, 128, M.Full()) for target in (HOPPER, BLACKWELL)),
        (HOPPER, 128, 256, LENGTHS),  # batch rows share the axis
    ],
)
def test_sums_beyond_int32_are_refused(target: ma.Target, head_dim: int, width: int, mask: M.Mask):
    most = (2**31 - 1) // width - 256
    assert flash(2, most, head_dim, target, mask=mask) == "flash"
    with pytest.raises(Unsupported, match="at most 2147483647 numbers"):
        flash(2, most + 1, head_dim, target, mask=mask)
