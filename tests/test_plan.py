"""Plans: what they choose, what they refuse, and every text a user meets, as golden files."""

from __future__ import annotations

import json

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
    b: int = 2,
    t: int = 4096,
    s: int | None = None,
    n: int = 8,
    k: int | None = None,
    h: int = 64,
    dtype: str = "bfloat16",
    **rest,
) -> ma.Call:
    shape = jax.ShapeDtypeStruct
    return ma.Call.of(shape((b, t, n, h), dtype), shape((b, s or t, k or n, h), dtype), **rest)


def config(**settings) -> ma.AttentionConfig:
    return ma.AttentionConfig(**settings)


# Each name is a golden file: what `explain` prints.
EXPLAINED = {
    "auto_short": lambda: ma.plan(call(t=64), target=CPU),
    "auto_long": lambda: ma.plan(call(), target=CPU),
    "dense_named": lambda: ma.plan(call(), config(attention="dot_product"), target=H200),
    "gathered_odd_length": lambda: ma.plan(
        call(t=32_760, n=40, h=128),
        config(context_parallel="all_gather"),
        {"fsdp": 2, "context": 8},
        V5P,
    ),
    "auto_on_a_mesh": lambda: ma.plan(call(t=75_600, n=40, h=128), mesh={"context": 8}, target=V5P),
    "heads_over_context": lambda: ma.plan(
        call(n=8), config(attention_sharding_uniform=False), {"context": 4}, V5P
    ),
    "heads_over_context_refused": lambda: ma.plan(
        call(n=6), config(attention_sharding_uniform=False), {"context": 4}, V5P
    ),
    "cross_on_a_mesh": lambda: ma.plan(
        call(t=32_760, s=512, n=40, h=128, role="cross"), mesh={"fsdp": 2, "context": 8}, target=V5P
    ),
    "block_window": lambda: ma.plan(
        call(t=32_760, n=12, h=128, mask=M.BlockSlidingWindow(1560, 7)), target=CPU
    ),
    "padding_and_bias": lambda: ma.plan(
        call(
            b=4,
            mask=M.Causal() & M.KeyPadding(np.array([9, 9, 9, 9])),
            bias=jnp.zeros((8, 4096, 4096)),
        ),
        mesh={"data": 4},
        target=CPU,
    ),
    "min_seq_length": lambda: ma.plan(call(t=64), config(flash_min_seq_length=4096), target=CPU),
    "fallback_warn": lambda: ma.plan(
        call(), config(attention="cudnn_flash_te", fallback="warn"), target=CPU
    ),
    "fallback_strategy": lambda: ma.plan(
        call(n=6), config(attention="ulysses", fallback="allow"), {"context": 4}, CPU
    ),
    "ulysses_ring": lambda: ma.plan(
        call(t=75_600, n=40, h=128),
        config(attention="ulysses_ring"),
        {"fsdp": 2, "context": 16},
        V5P,
    ),
    "keys_without_effect": lambda: ma.plan(
        call(),
        config(use_base2_exp=True, flash_block_sizes={"block_q": 512}, mask_padding_tokens=False),
        target=CPU,
    ),
    "one_key_head_over_tensor": lambda: ma.plan(call(k=1), mesh={"tensor": 4}, target=CPU),
    "ring": lambda: ma.plan(
        call(t=32_760, n=40, h=128), config(attention="ring"), {"fsdp": 2, "context": 4}, V5P
    ),
    "ring_window": lambda: ma.plan(
        call(t=32_760, n=40, h=128, mask=M.BlockSlidingWindow(1560, 7)),
        config(attention="ring"),
        {"context": 8},
        V5P,
    ),
    "gpu_spelling": lambda: ma.plan(
        call(),
        config(ici_fsdp_batch_parallelism=2, ici_fsdp_parallelism=2),
        {"fsdp": 2, "context": 2},
        H200,
    ),
    "strategy_and_one_device": lambda: ma.plan(call(), config(attention="ring"), target=CPU),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain(name: str) -> None:
    check_golden(f"explain/{name}", EXPLAINED[name]().explain())


def arrays(**changes) -> dict:
    given = {
        "q": jnp.zeros((2, 8, 4, 16)),
        "k": jnp.zeros((2, 8, 4, 16)),
        "v": jnp.zeros((2, 8, 4, 16)),
        "mask": None,
        "bias": None,
        "scale": None,
    }
    return given | changes


def attend(settings: dict | None = None, mesh: dict | None = None, **changes):
    """Call attention, or plan it for a mesh that need not be there."""
    x, cfg = arrays(**changes), config(**settings or {})
    if mesh is None:
        return ma.attention(x["q"], x["k"], x["v"], x["mask"], x["bias"], x["scale"], cfg)
    return ma.plan(ma.Call.of(x["q"], x["k"], x["mask"], x["bias"], x["scale"]), cfg, mesh)


def with_env(name: str, value: str) -> ma.Target:
    return ma.Target(
        "gpu", "NVIDIA H200", (("transformer-engine-jax", "2.20.2"),), ((name, value),)
    )


REFUSED = {
    "q_rank": lambda: attend(q=jnp.zeros((2, 8, 64))),
    "k_batch": lambda: attend(k=jnp.zeros((1, 8, 4, 16)), v=jnp.zeros((1, 8, 4, 16))),
    "k_head_dim": lambda: attend(k=jnp.zeros((2, 8, 4, 32)), v=jnp.zeros((2, 8, 4, 32))),
    "v_shape": lambda: attend(v=jnp.zeros((2, 9, 4, 16))),
    "kv_heads_do_not_divide": lambda: attend(
        k=jnp.zeros((2, 8, 3, 16)), v=jnp.zeros((2, 8, 3, 16))
    ),
    "empty": lambda: attend(q=jnp.zeros((2, 0, 4, 16))),
    "float64": lambda: attend(q=np.zeros((2, 8, 4, 16))),
    "integers": lambda: attend(q=jnp.zeros((2, 8, 4, 16), jnp.int32)),
    "mixed_dtypes": lambda: attend(q=jnp.zeros((2, 8, 4, 16), jnp.bfloat16)),
    "mask_float": lambda: attend(mask=jnp.zeros((8, 8))),
    "mask_shape": lambda: attend(mask=jnp.zeros((8, 9), bool)),
    "mask_looks_like_padding": lambda: attend(mask=jnp.zeros((2, 8), bool)),
    "mask_word": lambda: attend(mask="causal"),
    "causal_more_queries": lambda: attend(
        k=jnp.zeros((2, 4, 4, 16)), v=jnp.zeros((2, 4, 4, 16)), mask=M.Causal()
    ),
    "bias_shape": lambda: attend(bias=jnp.zeros((3, 1, 8, 8))),
    "bias_bool": lambda: attend(bias=jnp.zeros((8, 8), bool)),
    "scale_array": lambda: attend(scale=jnp.ones(4)),
    "batch_does_not_divide": lambda: attend(mesh={"data": 2, "fsdp": 4}),
    "heads_do_not_divide": lambda: attend(mesh={"tensor": 8}),
    "mesh_axis_unknown": lambda: attend(mesh={"contxt": 2}),
    "mesh_axis_zero": lambda: attend(mesh={"context": 0}),
    "mesh_too_large": lambda: config(ici_context_parallelism=3).make_mesh(),
    "mesh_sizes_wrong": lambda: config(
        ici_data_parallelism=2, ici_context_parallelism=2
    ).make_mesh(),
    "platform_cudnn_flash_te": lambda: attend({"attention": "cudnn_flash_te"}),
    "platform_cudnn_cross": lambda: ma.plan(
        call(role="cross"), config(cross_attention="cudnn"), target=V5P
    ),
    "package_te": lambda: ma.plan(call(), config(attention="cudnn_flash_te"), target=H200),
    "package_tokamax": lambda: ma.plan(call(), config(attention="tokamax_flash"), target=V5P),
    "switch_te": lambda: ma.plan(
        call(), config(attention="cudnn_flash_te"), target=with_env("NVTE_FUSED_ATTN", "0")
    ),
    "hardware": lambda: attend({"hardware": "gpu"}),
    "target_unknown": lambda: ma.Target.named("TPU v5pp"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(MaxattnError) as caught:
        REFUSED[name]()
    text = f"{type(caught.value).__name__}\n{caught.value}"
    assert "\n  rule    " in text
    assert "\n  remedy  " in text
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
    with pytest.raises(Unsupported):
        ma.plan(
            call(n=3),
            config(attention="auto", context_parallel="ulysses", fallback="error"),
            {"context": 2},
            CPU,
        )
    for policy in ("warn", "allow"):
        plan = ma.plan(call(), config(**named, fallback=policy), target=CPU)
        assert plan.fell_back
        assert [r.who for r in plan.refused] == ["cudnn"]
