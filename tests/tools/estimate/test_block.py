"""A transformer block's estimate: attention by the schedules that ship, the rest by XLA."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import maxattn as ma
from maxattn.errors import Unsupported
from maxattn.rope import rope_1d
from maxattn.target import Target
from maxattn.tools.cli.compile import estimate_lines
from maxattn.tools.compile.job import CompileJob, Outcome
from maxattn.tools.compile.programs import PARTS, TEXT, TransformerBlock, run_block
from maxattn.tools.estimate.program import attention_passes
from maxattn.tools.model_shapes import read
from tests.block_sizes.small_costs import CLOCK, KIND, costs, shipping
from tests.golden_text import check_golden
from tests.tools.cli.command import run

CALL = ma.Call(1, 8192, 8192, 2, 2, 128, "bfloat16")
FLASH = ma.AttentionConfig(attention="flash")
SENT = {"kind": "psum", "axes": ["context"], "bytes": 10**9, "times": 2, "kernels": []}


def plan_of(call: ma.Call = CALL, strategy: str = "ulysses", **mesh: int) -> ma.Plan:
    chosen = {"context_parallel": strategy} if mesh else {}
    return ma.plan(call, FLASH.replace(**chosen), mesh or None, Target.named(KIND))


@pytest.mark.parametrize(("policy", "runs"), [("NONE", 1), ("SAVE_ATTENTION", 1), ("FULL", 2)])
def test_passes_are_those_of_the_plan(monkeypatch, policy, runs):
    with shipping(monkeypatch, flash=costs(100, 350)):
        forward, backward = attention_passes(plan_of(), True, policy)
        (alone,) = attention_passes(plan_of(), False, policy)
        (shared,) = attention_passes(plan_of(context=2), False, policy)
    a_kernel = 2 * 8 * 8 * 350 / CLOCK  # of two heads, with tiles of 1,024
    assert (forward.calls, backward.calls, alone.calls) == (runs, 1, 1)
    assert forward.seconds == alone.seconds == pytest.approx((a_kernel, a_kernel))
    assert backward.seconds == pytest.approx((2 * a_kernel, 2 * a_kernel))  # dkv and dq
    assert shared.seconds == pytest.approx((a_kernel / 2, a_kernel / 2))  # one head each


def test_a_ring_calls_the_kernel_in_every_hop(monkeypatch):
    mesh = {"context": 4, "fsdp": 2}
    call = replace(CALL, batch=2, heads=4, kv_heads=4)
    masked = replace(call, mask=ma.masks.Causal().bind(8192, 8192).form())
    with shipping(monkeypatch, flash=costs(100, 350)):
        forward, backward = attention_passes(plan_of(call, "ring", **mesh), True, "FULL")
        gathered, _ = attention_passes(plan_of(call, "all_gather", **mesh), True, "NONE")
        with pytest.raises(Unsupported, match="no schedules that ship"):
            attention_passes(plan_of(masked, "ring", **mesh), True, "FULL")
    a_hop = 4 * 2 * 2 * 350 / CLOCK  # of four heads, with tiles of 1,024
    assert (forward.calls, backward.calls, gathered.calls) == (8, 4, 1)
    assert forward.seconds == pytest.approx((a_hop, a_hop))
    assert gathered.seconds == pytest.approx((4 * a_hop, 4 * a_hop))


def test_what_has_no_schedules_is_refused(monkeypatch):
    dense = ma.plan(CALL, ma.AttentionConfig(attention="dot_product"), None, Target.named(KIND))
    with shipping(monkeypatch, flash=costs(100, 350)):
        short = plan_of(replace(CALL, q_len=512, kv_len=512))
        for plan in (dense, short):
            with pytest.raises(Unsupported, match="no schedules that ship"):
                attention_passes(plan, True, "NONE")


def test_a_step_is_its_layers_and_what_waits_for_links():
    attention: list[dict[str, Any]] = [
        {"name": "forward", "calls": 2, "seconds": [0.003, 0.004]},
        {"name": "backward", "calls": 1, "seconds": [0.008, 0.009]},
    ]
    made = {"how": "estimated by libtpu 0.0.99's schedule, not run", "kernels": []}
    made |= {"attention": attention, "xla_seconds": 0.010, "xla_longest": [], "xla_unknown": []}
    found = [SENT | {"is_overlapped": hidden} for hidden in (True, False)]
    outcome = Outcome("compiled", "TPU v5p", mesh={"context": 4}, found=found)
    text = "\n".join(estimate_lines(replace(outcome, estimate=json.loads(json.dumps(made))), 40))
    check_golden("cli/estimate/block", text)
    # 2 * 3 + 8 + 10 ms of a layer at the fast end.
    assert "step    0.96 to 1.97 s" in text


REFUSED = {
    "block_and_module": ["--block", "256", "--module"],
    "block_below_one": ["--block", "-1"],
    "layers_without_estimate": ["--layers", "40"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(capsys, name):
    words = "compile", "attention=flash", "--target", "v6e", "--shape", "1,1024,1024,2,128"
    check_golden(f"cli/estimate/{name}", run(capsys, *words, *REFUSED[name]).text)


def test_a_block_runs_and_recomputes_what_it_does_not_keep():
    shape = replace(read("1,64,64,2,32"), dtype="float32")
    outs = []
    for policy in ("NONE", "FULL"):
        config = ma.AttentionConfig(attention="dot_product", remat_policy=policy)
        job = CompileJob("v6e:1x1", config, shape, block=128)
        block = TransformerBlock(job, None)
        keys = jax.random.split(jax.random.key(0), 3)
        sizes = (1, 64, 64), (1, TEXT, 64), (PARTS, 64)
        x, text, modulation = (jax.random.normal(k, s) for k, s in zip(keys, sizes, strict=True))
        rotary = rope_1d(32, 64)
        graph, state = nnx.split(block)

        def loss(state: Any, x: Any) -> Any:
            made = run_block(nnx.merge(graph, state), job, x, text, modulation, rotary)  # noqa: B023
            return jnp.square(made).sum()

        outs.append(jax.jit(jax.grad(loss, argnums=(0, 1)))(state, x)[1])
        still = nnx.eval_shape(lambda b: run_block(b, job, x, text, 0 * modulation, rotary), block)  # noqa: B023
        assert still.shape == x.shape
    assert jnp.abs(outs[0] - outs[1]).max() < 1e-4 * jnp.abs(outs[0]).max()
