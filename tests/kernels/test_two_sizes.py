"""A forward without a gradient uses its own tile sizes, and the plan names them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import maxattn as ma
from maxattn import announce
from tests.golden_text import check_golden
from tests.kernel_of import blocks_of
from tests.waiting import but

CPU, V6E = ma.Target.named("cpu"), ma.Target.named("TPU v6e")
# 72 is legal in inference, 192 nowhere.
SIZES = {"block_q": 72, "block_kv": 256, "block_kv_compute": 192}
CONFIG = ma.AttentionConfig(cross_attention="flash", flash_block_sizes=SIZES)


def wan(sizes: dict[str, Any]) -> ma.Plan:
    call = ma.Call(1, 75_600, 75_600, 12, 12, 128, "bfloat16")
    config = ma.AttentionConfig(attention="flash", flash_block_sizes=sizes)
    return ma.plan(call, config, target=V6E)


def test_an_inference_size_stays_and_the_plan_names_both() -> None:
    plan = wan({"block_q": 3024, "block_kv": 1024, "block_kv_compute": 512})
    inference = plan.kernel.for_inference()
    assert (blocks_of(inference).block_q, inference.changes) == (3024, ())
    assert blocks_of(plan.kernel).block_q % 128 == 0
    check_golden("explain/flash_two_sizes", plan.explain())


def test_sizes_that_agree_are_one_line() -> None:
    lines = wan({"block_q": 1024, "block_kv": 1024}).explain().splitlines()
    assert [line for line in lines if line.strip().startswith("blocks")] == [
        "  blocks  q 1024, kv 1024 by 512; backward dkv q 1024, kv 1024 by 512; dq q 1024, kv 1024"
    ]


X = jnp.ones((1, 144, 1, 64))


def loss(x: jax.Array) -> jax.Array:
    return (ma.attention(x, x, x, config=CONFIG, role="cross") ** 2).sum()


def test_what_runs_has_the_sizes_that_the_plan_names() -> None:
    plan = ma.plan(ma.Call.of(X, X, role="cross"), CONFIG, target=CPU)
    trained, inference = blocks_of(plan.kernel), blocks_of(plan.kernel.for_inference())
    assert (trained.block_q, inference.block_q) == (128, 72)
    for f, tile, other in ((loss, "[72,64]", "[128,64]"), (jax.grad(loss), "[128,64]", "[72,64]")):
        kernels = str(jax.make_jaxpr(f)(X))
        assert f"f32{tile}" in kernels and f"f32{other}" not in kernels


RUNS: dict[str, Callable[[Callable, jax.Array], Any]] = {
    "forward": lambda f, x: f(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, length=2),
    "vmap": lambda f, x: jax.vmap(f)(x[None]),
    "grad of jit": lambda f, x: jax.grad(jax.jit(f))(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(f))(x),
    "remat": lambda f, x: jax.grad(jax.checkpoint(f))(x),
    "scan of layers": lambda f, x: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, length=2)[0]
    )(x),
}
INFERENCE = ("forward", "scan", "vmap")


@pytest.fixture
def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Return the messages on block sizes since the last call."""
    monkeypatch.setattr(announce, "_logged", set())
    caplog.set_level(logging.INFO, logger="maxattn")
    return lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("Modified")]


FEW = ("forward", "vmap", "jit of grad")


@pytest.mark.parametrize("name", but(RUNS, FEW))
def test_the_changes_of_what_runs_are_logged_once(name: str, said: Callable[[], list[str]]) -> None:
    # What was compiled before is not compiled, and not said, again: a shape for each test.
    x = jnp.ones((1, 144, 2 + list(RUNS).index(name), 64))
    for _ in range(2):
        RUNS[name](loss, x)
    (text,) = said()
    check_golden(f"explain/log_{'inference' if name in INFERENCE else 'training'}", text)


def test_tracing_says_nothing(said: Callable[[], list[str]]) -> None:
    jax.make_jaxpr(loss)(X)
    jax.eval_shape(jax.grad(loss), X)
    assert said() == []
