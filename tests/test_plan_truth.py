"""Plans match the compiled program: the mask, the kernel, and every transfer."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M

CPU = ma.Target.named("cpu")


def qkv(length: int = 32, kv_heads: int = 4) -> tuple[jax.Array, ...]:
    keys, heads = jax.random.split(jax.random.key(0), 3), (4, kv_heads, kv_heads)
    q, k, v = (
        jax.random.normal(key, (8, length, n, 16)) for key, n in zip(keys, heads, strict=True)
    )
    return q, k, v


def plan(
    config: dict[str, Any] | None = None, mask: Any = None, mesh: Any = None, **sizes: int
) -> ma.Plan:
    q, k, _ = qkv(**sizes)
    return ma.plan(ma.Call.of(q, k, mask=mask), ma.AttentionConfig(**config or {}), mesh, CPU)


def test_forms_of_two_arrays_are_not_taken_for_one() -> None:
    """A key padding or the complement of *another* one does not allow every pair."""
    lengths, others = np.arange(1, 9), np.arange(8, 0, -1)
    either = M.KeyPadding(lengths) | ~M.KeyPadding(others)
    both = M.KeyPadding(lengths) & ~M.KeyPadding(others)
    assert not plan(mask=either).call.mask.is_full
    for mask in (either, both):
        form = mask.form()
        assert form.canonical() == form
        assert ma.Call.of(*qkv()[:2], mask=form).mask == form
    assert (M.KeyPadding(lengths) | ~M.KeyPadding(lengths)).is_full


def test_padding_that_is_not_masked_is_not_in_the_plan() -> None:
    decided = plan({"mask_padding_tokens": False}, M.KeyPadding(np.arange(1, 9)) & M.Causal())
    assert decided.call.mask == M.Causal(0)
    assert decided == plan({"mask_padding_tokens": False}, M.Causal())


def test_below_the_flash_length_dot_product_is_the_blockwise_one_where_that_was_asked() -> None:
    kernels = [
        plan({"flash_min_seq_length": 64, "use_memory_efficient_attention": asked}).kernel.name
        for asked in (True, False)
    ]
    assert kernels == ["memory_efficient", "dot_product"]


def test_chunk_sizes_that_nobody_reads_are_named() -> None:
    unread = "query_chunk_size has no effect: only read by the blockwise dot_product"
    assert unread in plan({"query_chunk_size": 7}).notes
    blockwise = {"query_chunk_size": 7, "use_memory_efficient_attention": True}
    assert not any("no effect" in note for note in plan(blockwise).notes)


def test_a_length_that_does_not_divide_says_what_it_costs() -> None:
    gathered = {"context_parallel": "all_gather"}
    notes = plan(gathered, mesh={"context": 8}, length=37).notes
    assert any("T=37 is no multiple of 8" in note for note in notes)
    assert not plan(gathered, mesh={"context": 8}, length=32).notes


def step_on(mesh_sizes: dict[str, int], kv_heads: int, bias: Any = None) -> tuple[ma.Plan, str]:
    """Compile a training step for placed operands; return its plan and program."""
    sizes: Any = {f"ici_{axis}_parallelism": size for axis, size in mesh_sizes.items()}
    config = ma.AttentionConfig(attention="dot_product", **sizes)
    mesh, (q, k, v) = config.make_mesh(), qkv(kv_heads=kv_heads)
    decided = ma.plan(ma.Call.of(q, k, bias=bias), config, mesh)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None, None, None))

    def step(q, k, v, bias):
        attend = partial(ma.attention, config=config, mesh=mesh)
        return jax.vjp(lambda *x: attend(*x[:3], bias=x[3]), q, k, v, bias)[1](q)

    given = [jax.device_put(x, place) for x in (q, k, v)]
    return decided, str(jax.jit(step).lower(*given, bias).compile().as_text())


def test_the_sum_over_copies_of_a_key_head_is_named() -> None:
    decided, text = step_on({"data": 2, "tensor": 4}, kv_heads=1)
    assert [str(c) for c in decided.collectives] == [
        "dK,dV of repeated heads psum over tensor, 16 KiB, backward"
    ]
    assert "all-reduce" in text, "the sum that the plan names is in the program"
    assert plan(mesh={"data": 2, "tensor": 4}, kv_heads=4).collectives == ()


@pytest.mark.parametrize("blockwise", [False, True])
def test_the_gradient_of_a_bias_is_summed_in_float32(blockwise: bool) -> None:
    """1 + 2**-9 is 1 in bfloat16: shares rounded before their sum would lose it."""
    config = ma.AttentionConfig(
        attention="dot_product", use_memory_efficient_attention=blockwise, ici_data_parallelism=8
    )
    mesh, (q, k, v) = config.make_mesh(), qkv()
    bias = jax.random.normal(jax.random.key(5), (1, 4, 32, 32)).astype("bfloat16")

    def step(bias: jax.Array, mesh: Any) -> jax.Array:
        attend = partial(ma.attention, q, k, v, config=config, mesh=mesh)
        return jax.grad(lambda b: (attend(bias=b) ** 2).sum())(bias)

    one, many = step(bias, None), step(bias, mesh)
    # One rounding to bfloat16 at the end: on one device as on eight.
    assert (one == many).mean() > 0.98


def test_a_plan_met_before_logging_is_set_up_is_logged_after(caplog: pytest.LogCaptureFixture):
    q, k, v = qkv(length=29)
    caplog.set_level(logging.ERROR, logger="maxattn")
    ma.attention(q, k, v)
    caplog.set_level(logging.INFO, logger="maxattn")
    for _ in range(2):
        ma.attention(q, k, v)
    assert [r.levelname for r in caplog.records] == ["INFO"]


def test_process_0_alone_logs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with caplog.at_level(logging.INFO, logger="maxattn"):
        q, k, v = qkv(length=28)
        ma.attention(q, k, v)
    assert not caplog.records


def test_float32_products_are_whole_on_every_matmul_unit() -> None:
    """A CPU has no lower precision, so the test reads the precision in the program."""
    q, k, v = qkv()
    for blockwise in (False, True):
        settings = {"attention": "dot_product", "use_memory_efficient_attention": blockwise}
        config = ma.AttentionConfig(**settings)
        step = jax.grad(lambda q, k, v, c=config: ma.attention(q, k, v, config=c).sum(), (0, 1, 2))
        text = str(jax.make_jaxpr(step)(q, k, v))
        highest = text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert text.count("dot_general[") == highest > 0
