"""Estimates of programs and blocks: the output of `compile --estimate`, and the shipped table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import maxattn as ma
from docs.building.tpu_estimates import table
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.errors import Unsupported
from maxattn.kernels.auto.tpu import tiled_kernels
from maxattn.rope import rope_1d
from maxattn.target import Target
from maxattn.tools.cli.compile import estimate_lines, report
from maxattn.tools.compile.job import CompileJob, Outcome, run_in_child
from maxattn.tools.compile.programs import PARTS, TEXT, TransformerBlock, run_block
from maxattn.tools.estimate.program import attention_passes, block_estimate, estimate_of
from maxattn.tools.model_shapes import read
from tests.block_sizes.small_costs import CLOCK, HEAD_DIM, KIND, costs, own_costs, shipping
from tests.golden_text import check_golden
from tests.packages import needs_libtpu
from tests.tools.cli.command import run
from tests.tools.estimate.dumps import BACKWARD, FOLDER, FORWARD, dump
from tests.tools.estimate.test_kernel import ALL, V6E, causal_plan, tiles_of

CONFIG = AttentionConfig(attention="flash")
WORDS = "estimated by libtpu 0.0.50.1's schedule, not run"
MEMORY = {"argument": 2**20, "temp": 0, "output": 2**20, "alias": 0, "generated_code": 0}
PRODUCTS = {"kind": "products", "seconds": 6e-6, "flops": 2e9, "bytes": 10**6, "by_cycles": 1e-5}
PRODUCTS |= {"without_cycles": 0, "longest": [("fusion.1", "dot_general", 4e-6)]}
LAYOUTS = {"kind": "layouts", "seconds": 4e-6, "flops": 0.0, "bytes": 10**7, "by_cycles": 2e-5}
LAYOUTS |= {"without_cycles": 2, "longest": [("copy.24", "mul", 3e-6), ("copy.2", "copy", 1e-6)]}
OTHERS = {"kind": "others", "seconds": 0.0, "flops": 0.0, "bytes": 0, "by_cycles": 0.0}
OTHERS |= {"without_cycles": 0, "longest": []}
HOP = {"kind": "ppermute", "axes": ["context"], "bytes": 9 * 10**5, "times": 3}
HOP |= {"is_async": True, "is_overlapped": True, "kernels": [BACKWARD]}


def outcome(estimate: dict[str, Any], kind: str = "TPU v5p") -> Outcome:
    found = Outcome("compiled", kind, "the plan", {"context": 4}, [], [HOP], MEMORY, 1.0)
    return replace(found, estimate=json.loads(json.dumps(estimate)))


def test_the_report():
    kernels = [dump("v5p", FORWARD).estimate(ALL, 3)._asdict()]
    backward = dump("v5p", BACKWARD).estimate(ALL)
    kernels += [backward._replace(name=f"{BACKWARD[:-1]}{i}")._asdict() for i in (1, 2)]
    made = outcome(
        {"how": WORDS, "kernels": kernels, "xla_seconds": 1e-5, "xla": [PRODUCTS, LAYOUTS, OTHERS]}
    )
    lines = estimate_lines(made)
    assert all(line.endswith(WORDS) for line in lines)  # beside every number
    check_golden("cli/estimate/report", "\n".join(lines))


def test_the_report_of_masks_and_of_what_is_not_known():
    tiles = tiles_of(causal_plan(), False)["fwd"]
    kernels = [dump("v6e", FORWARD).estimate(tiles)._asdict()]
    bound = tiles_of(causal_plan("flash", "ring", 4), True)["dkv"]
    kernels += [dump("v5p", BACKWARD).estimate(each)._asdict() for each in (bound, None)]
    made = outcome(
        {"how": WORDS, "kernels": kernels, "xla_seconds": 0.0, "xla": []},
        "TPU v6e",
    )
    check_golden("cli/estimate/report_of_masks", "\n".join(estimate_lines(made)))


def test_a_refused_estimate_is_no_success(capsys, monkeypatch):
    made = outcome({"refused": "estimate: why"})
    job = CompileJob("v5p:2x2x1", CONFIG, read("1,512,512,2,128"))
    assert report(job, made).splitlines()[-2:] == ["estimate: why", "fits"]
    monkeypatch.setattr("maxattn.tools.cli.compile.run_in_child", lambda job, limit: made)
    words = ["attention=flash", "--target", "v5p", "--shape", "1,512,512,2,128"]
    assert run(capsys, "compile", *words, "--estimate").status == 1
    made = outcome({})
    assert run(capsys, "compile", *words).status == 0


HLO = """HloModule jit_f, num_partitions=1

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %inside = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"1000000"}
}

%body (p: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %again = f32[8]{0} copy(%q), backend_config={"estimated_cycles":"50"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"700"}
  %w = f32[8]{0} while(%a), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %never = f32[8]{0} copy(%x), backend_config={"estimated_cycles":"9223372036854775807"}
  %splash_mha_fwd_residuals.1 = f32[8]{0} custom-call(%w), KERNEL"forward"}}
  %other.7 = f32[8]{0} custom-call(%w), KERNEL"forward"}}
  ROOT %splash_mha_dkv_no_residuals.1 = f32[8]{0} custom-call(%w), KERNEL"backward"}}
}
""".replace(
    "KERNEL", 'custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":'
)


def test_a_program_is_its_kernels_and_xlas_operations(monkeypatch):
    monkeypatch.setattr("maxattn.tools.estimate.program.metadata.version", lambda _: "0.0.50.1")
    made = estimate_of(HLO, FOLDER / "v5p", V6E, lambda dump: ALL if dump.phase else None)
    assert (made["libtpu"], made["how"]) == ("0.0.50.1", WORDS)
    _, layouts, _ = made["xla"]
    # Eight reads and writes of 32 bytes: the loop's copy runs six times, a fusion's inside counts
    # once. The largest int64 is no number of cycles.
    assert made["xla_seconds"] == layouts["seconds"] == pytest.approx(8 * 64 / 1.64e12)
    assert layouts["by_cycles"] == (700 + 6 * 50) / 1.75e9
    assert (layouts["without_cycles"], layouts["longest"][0][:2]) == (1, ("again", "copy"))
    names = [kernel["name"] for kernel in made["kernels"]]
    assert names == [FORWARD, "other.7", BACKWARD]
    # The kernel without a file is the same as the first; its name says no phase.
    first, twin, _ = made["kernels"]
    assert twin["steps"] == first["steps"] and (twin["flops"], twin["hbm"]) == (0.0, 0.0)


def test_a_libtpu_that_was_not_tested_is_named(monkeypatch):
    monkeypatch.setattr("maxattn.tools.estimate.program.metadata.version", lambda _: "0.0.99")
    made = estimate_of(HLO, FOLDER / "v5p", V6E, lambda dump: ALL if dump.phase else None)
    assert (
        made["how"] == "estimated by libtpu 0.0.99's schedule (tested: >=0.0.42,<0.0.53), not run"
    )


def test_a_program_beyond_the_instruction_memory_is_named():
    large = dump("v5p", FORWARD).estimate(ALL)._replace(bundles=66_545, longest=14_300)
    made = {"how": WORDS, "kernels": [large._asdict()], "xla_seconds": 0.0, "xla": []}
    (line,) = (x for x in estimate_lines(outcome(made)) if "program" in x)
    check_golden("cli/estimate/large_program", line)


@needs_libtpu
@pytest.mark.parametrize("kernel, phases", [("flash", ("fwd", "dq", "dkv"))])
def test_every_kernel_of_a_training_step(kernel, phases, capsys):
    words = [f"attention={kernel}", "--target", "v5e:1x1", "--train", "--estimate", "--json"]
    ran = run(capsys, "compile", *words, "--shape", "1,1024,1024,2,128")
    (made,) = json.loads(ran.out)
    kernels = made["estimate"]["kernels"]
    assert ran.status == 0
    assert {re.findall("_(fwd|dkv|dq)", k["name"])[0] for k in kernels} == {*phases}
    for one in kernels:
        assert one["steps"] == 2 * 2 * 2 and (one["full"], one["masked"]) == (1.0, 0.0)
        fast, slow = one["seconds"]
        assert 0 < fast <= slow
        assert 0.1 < one["flops"] / fast / one["peak"] <= 1


@needs_libtpu
def test_the_folder_of_schedules_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = CompileJob("v5e:1x1", CONFIG, read("1,256,256,1,128"), estimate=True)
    for limit in (120, 1):
        assert run_in_child(job, limit).ending == ("compiled" if limit == 120 else "timeout")
        assert list(tmp_path.iterdir()) == []


# ---- a transformer block -------------------------------------------------------------------------

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
        assert attention_passes(plan_of(masked, "ring", **mesh), True, "FULL") == ()
    a_hop = 4 * 2 * 2 * 350 / CLOCK  # of four heads, with tiles of 1,024
    assert (forward.calls, backward.calls, gathered.calls) == (8, 4, 1)
    assert forward.seconds == pytest.approx((a_hop, a_hop))
    assert gathered.seconds == pytest.approx((4 * a_hop, 4 * a_hop))


def test_what_has_no_schedules_is_refused(monkeypatch):
    cross = plan_of(replace(CALL, kv_len=TEXT, role="cross"))
    dense = ma.plan(CALL, ma.AttentionConfig(attention="dot_product"), None, Target.named(KIND))
    with shipping(monkeypatch, flash=costs(100, 350)):
        short = plan_of(replace(CALL, q_len=512, kv_len=512))
        for plan in (dense, short):
            with pytest.raises(Unsupported, match="ships no schedules"):
                block_estimate("", V6E, (plan, cross), True, "NONE")


def test_cross_attention_is_priced_too() -> None:
    call = read("wan-14b-cross").call()
    plan = ma.plan(call, ma.AttentionConfig(), None, Target.named("TPU v6e"))
    forward, backward = attention_passes(plan, True, "FULL")
    assert (forward.name, forward.calls) == ("cross-attention's forward", 2)
    assert 0 < forward.seconds.slow < backward.seconds.fast


def test_a_step_is_its_layers_and_what_waits_for_links():
    attention: list[dict[str, Any]] = [
        {"name": "self-attention's forward", "calls": 2, "seconds": [0.003, 0.004]},
        {"name": "self-attention's backward", "calls": 1, "seconds": [0.008, 0.009]},
    ]
    made = {"how": "estimated by libtpu 0.0.99's schedule, not run", "kernels": []}
    made |= {"attention": attention, "xla_seconds": 0.010, "xla": []}
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


@pytest.mark.slow
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


# ---- the table in the results --------------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "results_tpu.md"


def test_the_page_has_the_table():
    assert table() in PAGE.read_text()


def test_a_row_has_what_auto_takes_and_rates_without_padding(monkeypatch):
    call = Call(1, 75_600, 75_600, 40, 40, HEAD_DIM, "bfloat16")
    with shipping(monkeypatch, flash=costs(100, 350), tpu_flash=own_costs(700, 1000)):
        start = "| v6e | wan-14b-720p | forward |"
        rows = [row for row in table().splitlines() if row.startswith(start)]
        assert tiled_kernels(call, Target.named(KIND))[0][0] == "tpu_flash"
    # 37 x 37 tiles of 2,048 a head, at 700 bundles of 1.75 GHz.
    seconds = 40 * 37 * 37 * 700 / 1.75e9
    rate = f"{4 * 40 * 75_600**2 * HEAD_DIM / seconds / 1e12:.0f}"
    assert [row.split(" | ")[-2:] for row in rows] == [[rate, "tpu_flash |"]]
