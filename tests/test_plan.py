"""Plans: choices, refusals, and all of their texts, as golden files."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import MaxattnError, Unsupported
from tests.golden_text import check_golden

CPU = ma.Target.named("cpu")
H200 = ma.Target.named("NVIDIA H200")
V5P = ma.Target.named("TPU v5p")


def call(
    b: int = 2, t: int = 4096, s: int = 0, n: int = 8, k: int = 0, h: int = 64, **rest: Any
) -> ma.Call:
    shapes = (b, t, n, h), (b, s or t, k or n, h)
    return ma.Call.of(*(jax.ShapeDtypeStruct(x, "bfloat16") for x in shapes), **rest)


def config(**settings) -> ma.AttentionConfig:
    return ma.AttentionConfig(**settings)


LONG = {"t": 32_760, "n": 40, "h": 128}
FULL = LONG | {"t": 75_600}
FRAMES = M.BlockSlidingWindow(1560, 7)
PADDED = M.Causal() & M.KeyPadding(np.array([9, 9, 9, 9]))
SPREAD_HEADS = {"attention_sharding_uniform": False}
UNREAD: dict[str, Any] = {
    "use_base2_exp": True, "flash_block_sizes": {"block_q": 512}, "mask_padding_tokens": False,
}  # fmt: skip
GPU_SPELLING = {"ici_fsdp_batch_parallelism": 2, "ici_fsdp_parallelism": 2}
TE = "cudnn_flash_te"
# A golden file of what `explain` prints: the call, the config, the mesh and the target.
EXPLAINED: dict[str, tuple[dict[str, Any], dict[str, Any], Any, ma.Target]] = {
    "auto_short": ({"t": 64}, {}, None, CPU),
    "auto_long": ({}, {}, None, CPU),
    "dense_named": ({}, {"attention": "dot_product"}, None, H200),
    "gathered_odd_length": (
        LONG, {"context_parallel": "all_gather"}, {"fsdp": 2, "context": 8}, V5P
    ),
    "auto_on_a_mesh": (FULL, {}, {"context": 8}, V5P),
    "heads_over_context": ({"n": 8}, SPREAD_HEADS, {"context": 4}, V5P),
    "heads_over_context_refused": ({"n": 6}, SPREAD_HEADS, {"context": 4}, V5P),
    "cross_on_a_mesh": (LONG | {"s": 512, "role": "cross"}, {}, {"fsdp": 2, "context": 8}, V5P),
    "block_window": (LONG | {"n": 12, "mask": FRAMES}, {}, None, CPU),
    "padding_and_bias": (
        {"b": 4, "mask": PADDED, "bias": jnp.zeros((8, 4096, 4096))}, {}, {"data": 4}, CPU
    ),
    "min_seq_length": ({"t": 64}, {"flash_min_seq_length": 4096}, None, CPU),
    "fallback_warn": ({}, {"attention": TE, "fallback": "warn"}, None, CPU),
    "fallback_strategy": (
        {"n": 6}, {"attention": "ulysses", "fallback": "allow"}, {"context": 4}, CPU
    ),
    "ulysses_ring": (FULL, {"attention": "ulysses_ring"}, {"fsdp": 2, "context": 16}, V5P),
    "keys_without_effect": ({}, UNREAD, None, CPU),
    "one_key_head_over_tensor": ({"k": 1}, {}, {"tensor": 4}, CPU),
    "ring": (LONG, {"attention": "ring"}, {"fsdp": 2, "context": 4}, V5P),
    "ring_window": (LONG | {"mask": FRAMES}, {"attention": "ring"}, {"context": 8}, V5P),
    "gpu_spelling": ({}, GPU_SPELLING, {"fsdp": 2, "context": 2}, H200),
    "strategy_and_one_device": ({}, {"attention": "ring"}, None, CPU),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain(name: str) -> None:
    asked, settings, mesh, target = EXPLAINED[name]
    plan = ma.plan(call(**asked), config(**settings), mesh, target)
    check_golden(f"explain/{name}", plan.explain())


def zeros(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.zeros(shape, dtype)


def attend(settings: dict | None = None, mesh: dict | None = None, kv: Any = None, **changes: Any):
    """Call attention, or plan it for a mesh that need not exist."""
    x = dict.fromkeys("qkv", zeros(2, 8, 4, 16)) | dict.fromkeys("kv" if kv is not None else "", kv)
    x, cfg = x | changes, config(**settings or {})
    if mesh is None:
        return ma.attention(**x, config=cfg)
    return ma.plan(ma.Call.of(x["q"], x["k"]), cfg, mesh)


SWITCHED_OFF = ma.Target(
    "gpu", "NVIDIA H200", (("transformer-engine-jax", "2.20.2"),), (("NVTE_FUSED_ATTN", "0"),)
)


HALF_OF_THE_DEVICES = {"ici_data_parallelism": 2, "ici_context_parallelism": 2}
CUDNN = config(cross_attention="cudnn")
REFUSED = {
    "q_rank": lambda: attend(q=zeros(2, 8, 64)),
    "q_rank_5": lambda: attend(q=zeros(2, 3, 8, 4, 16)),
    "k_in_torchs_layout": lambda: attend(q=zeros(2, 4, 96, 16), kv=zeros(2, 4, 77, 16)),
    "v_in_torchs_layout": lambda: attend(v=zeros(2, 4, 8, 16)),
    "k_batch": lambda: attend(kv=zeros(1, 8, 4, 16)),
    "k_head_dim": lambda: attend(kv=zeros(2, 8, 4, 32)),
    "v_shape": lambda: attend(v=zeros(2, 9, 4, 16)),
    "kv_heads_do_not_divide": lambda: attend(kv=zeros(2, 8, 3, 16)),
    "empty": lambda: attend(q=zeros(2, 0, 4, 16)),
    "float64": lambda: attend(q=np.zeros((2, 8, 4, 16))),
    "integers": lambda: attend(q=zeros(2, 8, 4, 16, dtype="int32")),
    "mixed_dtypes": lambda: attend(q=zeros(2, 8, 4, 16, dtype="bfloat16")),
    "mask_float": lambda: attend(mask=zeros(8, 8)),
    "mask_shape": lambda: attend(mask=zeros(8, 9, dtype="bool")),
    "mask_looks_like_padding": lambda: attend(mask=zeros(2, 8, dtype="bool")),
    "mask_looks_like_0_and_1": lambda: attend(mask=zeros(2, 8, dtype="int32")),
    "mask_looks_like_bias": lambda: attend(mask=zeros(2, 8)),
    "mask_word": lambda: attend(mask="causal"),
    "causal_more_queries": lambda: attend(kv=zeros(2, 4, 4, 16), mask=M.Causal()),
    "bias_shape": lambda: attend(bias=zeros(3, 1, 8, 8)),
    "bias_bool": lambda: attend(bias=zeros(8, 8, dtype="bool")),
    "bias_integers": lambda: attend(bias=zeros(8, 8, dtype="int32")),
    "scale_array": lambda: attend(scale=jnp.ones(4)),
    "batch_does_not_divide": lambda: attend(mesh={"data": 2, "fsdp": 4}),
    "heads_do_not_divide": lambda: attend(mesh={"tensor": 8}),
    "mesh_axis_unknown": lambda: attend(mesh={"contxt": 2}),
    "mesh_axis_zero": lambda: attend(mesh={"context": 0}),
    "mesh_too_large": lambda: config(ici_context_parallelism=3).make_mesh(),
    "mesh_sizes_wrong": lambda: config(**HALF_OF_THE_DEVICES).make_mesh(),
    "platform_cudnn_flash_te": lambda: attend({"attention": TE}),
    "platform_cudnn_cross": lambda: ma.plan(call(role="cross"), CUDNN, target=V5P),
    "package_te": lambda: ma.plan(call(), config(attention=TE), target=H200),
    "package_tokamax": lambda: ma.plan(call(), config(attention="tokamax_flash"), target=V5P),
    "switch_te": lambda: ma.plan(call(), config(attention=TE), target=SWITCHED_OFF),
    "hardware": lambda: attend({"hardware": "gpu"}),
    "target_unknown": lambda: ma.Target.named("TPU v5pp"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(MaxattnError) as caught:
        REFUSED[name]()
    text = f"{type(caught.value).__name__}\n{caught.value}"
    assert "\n  rule    " in text and "\n  remedy  " in text
    check_golden(f"refused/{name}", text)


def test_a_plan_is_a_value() -> None:
    first, again = (ma.plan(call(mask=M.Causal()), target=CPU) for _ in range(2))
    assert first == again
    assert hash(first) == hash(again)
    assert first != ma.plan(call(), target=CPU)
    assert json.loads(json.dumps(first.to_dict())) == first.to_dict()


def test_plans_differ_by_name() -> None:
    old = ma.plan(call(), config(attention="dot_product"), target=CPU)
    new = ma.plan(call(), target=CPU)
    saved = json.loads(json.dumps(old.to_dict()))
    assert new.diff(saved)[0] == "asked: attention: dot_product -> attention: auto"
    assert "kernel: dot_product -> memory_efficient" in new.diff(saved)
    assert new.diff(new) == ()


def test_plans_that_were_saved_with_older_names_are_read() -> None:
    asked, h200 = config(attention="flash"), ma.Target.named("NVIDIA H200", (("fa4-jax", "0.1.0"),))
    plan = ma.plan(ma.Call(1, 256, 256, 2, 2, 64, "bfloat16"), asked, target=h200)
    renamed = {"strategy": "context", "kernel.sms": "kernel.processors"}
    saved = {renamed.get(key, key): value for key, value in plan.to_dict().items()}
    assert saved.keys() >= {"context", "kernel.processors"}
    assert plan.diff(saved) == ()
    assert plan.diff(saved | {"kernel.lists": True, "kernel.tests_pairs": False}) == ()
    assert plan.diff(saved | {"context": "ring"}) == ("strategy: ring -> none",)
    assert plan.context is plan.strategy


def test_a_pair_that_was_saved_with_older_names_is_read() -> None:
    h200 = ma.Target.named("NVIDIA H200", (("fa4-jax", "0.1.0"),))
    plan = ma.plan(ma.Call(2, 4096, 4096, 8, 8, 256, "bfloat16"), target=h200)
    saved = plan.to_dict()
    assert saved["kernel"] == "flash/cudnn"
    first = dict(saved["kernel.first"])
    first["processors"] = first.pop("sms")
    assert plan.diff(saved | {"kernel.first": first}) == ()
    (differs,) = plan.diff(saved | {"kernel.first": first | {"processors": 1}})
    assert differs.startswith("kernel.first: ")


def test_a_plan_needs_no_device_of_its_target() -> None:
    sizes = {"fsdp": 64, "context": 16, "tensor": 4}
    plan = ma.plan(call(b=64, t=75_600, n=40, h=128), config(hardware="tpu"), sizes)
    assert plan.target == V5P
    assert plan.mesh == (("fsdp", 64), ("context", 16), ("tensor", 4))
    assert plan.q_len == 75_600


def test_an_error_policy_refuses_and_the_others_run_something_else() -> None:
    named = {"attention": "cudnn"}
    with pytest.raises(Unsupported):
        ma.plan(call(), config(**named), target=CPU)
    strict = config(context_parallel="ulysses", fallback="error")
    with pytest.raises(Unsupported):
        ma.plan(call(n=3), strict, {"context": 2}, CPU)
    for policy in ("warn", "allow"):
        plan = ma.plan(call(), config(**named, fallback=policy), target=CPU)
        assert plan.fell_back
        assert [r.who for r in plan.refused] == ["cudnn"]


WITH_TE = ma.Target.named("NVIDIA H200", packages={"transformer-engine-jax": "2.20.2"})
KEY_BIAS = jax.ShapeDtypeStruct((1, 1, 1, 1024), jnp.bfloat16)
OF_CROSS: dict[str, tuple[str, ma.Target, Any, Any]] = {
    "a bias": ("flash", V5P, None, KEY_BIAS),
    "a mask on shards": ("cudnn_flash_te", WITH_TE, M.Causal(offset=64), None),
}


@pytest.mark.parametrize("name", OF_CROSS)
def test_a_remedy_of_cross_attention_is_followed(name: str) -> None:
    """The remedy names `cross_attention`, and only strategies that cross-attention supports."""
    kernel, target, mask, bias = OF_CROSS[name]
    asked = call(1, 1024, mask=mask, bias=bias, role="cross")
    plan = partial(ma.plan, asked, mesh={"context": 2}, target=target)
    with pytest.raises(Unsupported) as refused:
        plan(config(cross_attention=kernel, context_parallel="ring"))
    assert "context_parallel" not in refused.value.remedy
    settings = r"\b(cross_attention|use_memory_efficient_attention): (\w+)"
    said = re.findall(settings, refused.value.remedy)
    assert said[0][0] == "cross_attention"
    plan(config(**{key: value if value != "true" else True for key, value in said}))
