"""`maxattn tune` with `attention: auto`: kernels timed on this CPU, and plans that choose them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import maxattn as ma
from maxattn.kernels import table
from maxattn.masks import KeyPadding, LocalWindow
from maxattn.target import Target
from maxattn.tools.cli import tune_kernels
from maxattn.tools.cli.progress import CLEAR
from maxattn.tools.model_shapes import changed, read
from maxattn.tools.tune.kernel_times import PassTimes
from tests.golden_text import check_golden
from tests.tools.cli.command import run
from tests.tools.tune.small import measurements, small_call

SMALL = ["attention=auto", "--shape", "1,300,300,2,8", "--dtype", "f32"]
# Few scores, of which the window leaves one in forty: the rule takes dense, which is far slower.
WINDOW = [SMALL[0], "--shape", "1,1400,1400,2,16", "--dtype", "f32", "--mask", "window:32,0"]


MS = {"dot_product": 2.0, "memory_efficient": 1.0}


@pytest.fixture
def quick(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache, and constant times: dense takes twice as long."""

    def times(built: dict, what: str, *_: object) -> PassTimes:
        return PassTimes({name: (MS[name],) * 7 for name in built}, {})

    monkeypatch.setattr(tune_kernels, "time_pass", times)
    return cache


@pytest.fixture
def broken() -> Iterator[None]:
    """A kernel whose backward does not compile."""
    table.add(table.KernelRow("broken", "tests.tools.tune.small:Broken"))
    yield
    table.remove("broken")


def without_times(text: str, cache: Path) -> str:
    """Replace text that differs between runs by #, and fix the winner."""
    text = re.sub(r" +\d[\d.,]*(?=[ \n])", " #", text.replace(str(cache), "tuned.json"))
    text = re.sub(
        r"  (fastest|auto takes) [\w/]+(:.*\n)(  not .*noise\n)?", r"  fastest KERNEL\2", text
    )
    text = re.sub(r"  without times auto takes .*\n", "  WITHOUT TIMES\n", text)
    return re.sub(r"to name one kernel: .*\n", "to name one kernel: YAML\n", text)


def test_a_shape_that_the_rule_mispredicts_is_one_command_from_right(capsys, quick):
    shape = changed(read("1,1400,1400,2,16"), None, "f32", LocalWindow(32, 0), None)
    before = ma.plan(shape.call())
    assert before.kernel.name == "dot_product" and before.because.startswith("dense, since")
    ran = run(capsys, "tune", *WINDOW)
    assert ran.status == 0 and "without times auto takes dot_product: 4 ms, 2.00 times" in ran.out
    plan = ma.plan(shape.call())
    assert plan.kernel.name == "memory_efficient"
    assert plan.because.startswith("measured here by maxattn tune: forward memory_efficient 1.00 ")
    assert "; backward memory_efficient 1.00 ms" in plan.because
    q = jax.random.normal(jax.random.key(0), (1, 1400, 2, 16))
    dense = ma.attention(q, q, q, shape.mask, config=ma.AttentionConfig(attention="dot_product"))
    np.testing.assert_allclose(ma.attention(q, q, q, shape.mask), dense, atol=2e-6)


def test_what_is_faster_by_less_than_the_noise_is_named(capsys, quick, monkeypatch):
    monkeypatch.setitem(MS, "dot_product", 1.004)
    out = run(capsys, "tune", *SMALL).out
    assert "fastest" not in out
    assert (
        "  auto takes dot_product: 2.01 ms forward and backward\n"
        "  not memory_efficient, 2 ms: no faster than the noise\n"
        "  without times auto takes the same: dense, since "
    ) in out
    assert "to name one kernel: attention: dot_product" in out


def test_what_it_prints_of_real_times(capsys, cache):
    ran = run(capsys, "tune", *SMALL)
    assert ran.status == 0 and "compiling dot_product, backward" in ran.err
    check_golden("cli/tune/kernels", without_times(ran.out, cache))
    again = run(capsys, "tune", *SMALL)
    assert again.err == "" and "measured before; --again measures again" in again.out
    before = measurements(cache)
    assert "compiling" in run(capsys, "tune", *SMALL, "--again", "--forward").err
    assert len(measurements(cache)) == 1 and measurements(cache) != before


def test_several_calls_end_with_a_table_of_what_changes(capsys, quick):
    ran = run(capsys, "tune", *WINDOW, "--shape", "1,40,40,2,16")
    _, table = ran.out.split("\nchanged: ")
    assert table.splitlines() == [
        "2 of 2 calls",
        "  call              without      with              ms without  ms with",
        "  1,1400,1400,2,16  dot_product  memory_efficient        4.00     2.00",
        "  1,40,40,2,16      dot_product  memory_efficient        4.00     2.00",
    ]


def test_a_terminal_shows_a_bar(capsys, cache, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    ran = run(capsys, "tune", *SMALL, "--forward")
    bars = [line for line in ran.err.split(CLEAR) if "█" in line]
    assert len(bars) == 5 and bars[0].endswith("compiling dot_product, forward")
    assert bars[-1].count("█") == 24 and "·" not in bars[-1] and ran.err.endswith(CLEAR)


def test_the_forward_alone_leaves_the_backward_to_the_rule(capsys, quick):
    ran = run(capsys, "tune", *SMALL, "--forward")
    (found,) = measurements(quick)
    assert found["backward_ms"] == {} and "ms forward\n" in ran.out and "backward" not in ran.out
    plan = ma.plan(small_call())
    assert plan.kernel.name.split("/")[-1] == "dot_product"
    assert "; backward dot_product by the rules, dense, since" in plan.because
    run(capsys, "tune", *SMALL, "--train")
    (both,) = measurements(quick)
    assert (
        both["forward_ms"] == found["forward_ms"]
        and both["backward_ms"].keys() == both["forward_ms"].keys()
    )


def test_lengths_of_one_shape_are_one_call(capsys, quick):
    words = ["attention=auto", "--shape", "2,64,48,2,8", "--dtype", "f32", "--forward"]
    run(capsys, "tune", *words, "--mask", "lengths:5,48")
    shape = changed(read("2,64,48,2,8"), None, "f32", None, None)
    for lengths in (np.array([9, 10]), np.array([1, 2], np.int32)):
        plan = ma.plan(replace(shape, mask=KeyPadding(lengths)).call())
        assert (
            plan.because.startswith("measured here")
            and "with the mask lengths:5,48" in plan.notes[-1]
        )
    flags = replace(shape, mask=KeyPadding(np.ones((2, 48), bool)))
    assert not any("measured" in ma.plan(s.call()).because.split("(")[0] for s in (shape, flags))
    run(capsys, "tune", *words, "--mask", "lengths:40,41")  # other arrays: timed anew, and taken
    assert [m["data"] for m in measurements(quick)] == ["lengths:5,48", "lengths:40,41"]
    plan = ma.plan(replace(shape, mask=KeyPadding(np.array([9, 10]))).call())
    assert "lengths:40,41" in plan.notes[-1]


def test_the_call_of_one_device_is_timed(capsys, quick):
    run(capsys, "tune", "attention=auto", "--shape", "4,64,64,4,8", "--mask", "lengths:5,48,9,9",
        "--mesh", "data=2,tensor=2", "--forward")  # fmt: skip
    (found,) = measurements(quick)
    assert found["call"] == "B=2 T=S=64 N=2 H=8 bf16 KeyPadding(int[2])"
    call = replace(read("2,64,64,2,8"), mask=KeyPadding(np.array([5, 48]))).call()
    assert ma.plan(call).because.startswith("measured here")


def test_a_kernel_that_does_not_compile_is_left_out(capsys, cache, broken):
    ran = run(capsys, "tune", *SMALL)
    (found,) = measurements(cache)
    why = "backward: CompilerError: no registers for head dim 8"
    assert ran.status == 0 and found["failed"] == {"broken": why}
    assert f"does not run: {why}" in ran.out and "broken" not in found["backward_ms"]
    plan = ma.plan(small_call())
    (reason,) = plan.refused
    check_golden("cli/tune/kernel_failed", str(reason))
    assert plan.kernel.name.split("/")[-1] != "broken"
    assert "compiling" not in run(capsys, "tune", *SMALL).err


def test_a_named_kernel_is_not_displaced(capsys, quick):
    run(capsys, "tune", *SMALL, "--forward")
    config = ma.AttentionConfig(attention="dot_product")
    assert ma.plan(small_call(), config).because == "named in the config"
    least = ma.AttentionConfig(flash_min_seq_length=4096)
    assert "flash_min_seq_length" in ma.plan(small_call(), least).because


def test_settings_of_kernels_are_part_of_a_call(capsys, quick):
    run(capsys, "tune", *SMALL, "--forward")
    assert "measured here" in ma.plan(small_call(), ma.AttentionConfig(attention="auto")).because
    for other in ({"float32_qk_product": True}, {"query_chunk_size": 64}):
        assert "measured here" not in ma.plan(small_call(), ma.AttentionConfig(**other)).because
    run(capsys, "tune", *SMALL, "query_chunk_size=64", "--forward")
    assert [m["settings"] for m in measurements(quick)] == ["", "query_chunk_size 64"]
    assert "measured here" in ma.plan(small_call(), ma.AttentionConfig(query_chunk_size=64)).because


def test_a_stop_loses_at_most_a_pass(capsys, quick, monkeypatch):
    """The first call's second pass is stopped; its forward is stored, and not timed again."""
    timed, words = [], ["tune", *SMALL, "--shape", "1,301,301,2,8"]
    real = tune_kernels.time_pass

    def times(built: dict, what: str, call: ma.Call, *rest: object) -> PassTimes:
        timed.append((what, call.q_len))
        if len(timed) == 2:
            raise KeyboardInterrupt
        return real(built, what, call, *rest)

    monkeypatch.setattr(tune_kernels, "time_pass", times)
    assert run(capsys, *words).status == 130
    assert measurements(quick)[0]["forward_ms"] and "measured here" in ma.plan(small_call()).because
    assert run(capsys, *words).status == 0
    assert timed[2:] == [("backward", 300), ("forward", 301), ("backward", 301)]
    assert all(found["forward_ms"] and found["backward_ms"] for found in measurements(quick))


def test_several_shapes_stand_in_one_file_beside_sizes(capsys, quick):
    run(capsys, "tune", *SMALL, "--shape", "1,200,100,2,8", "--forward")
    run(capsys, "tune", *SMALL, "--sizes", "--limit", "1", "--forward")
    kinds = ["sizes" in m for m in json.loads(quick.read_text())["measurements"]]
    assert (
        kinds == [False, False]
        and "dot_product has no sizes to tune" in run(capsys, "tune", *SMALL, "--sizes").out
    )
    chunks = ["attention=dot_product", "use_memory_efficient_attention=true", *SMALL[1:]]
    run(capsys, "tune", *chunks, "--limit", "1", "--forward")
    assert ["sizes" in m for m in measurements(quick)] == [False, False, True]
    assert "measured here" in ma.plan(small_call()).because


ELSEWHERE = {
    "sizes_elsewhere": "attention=flash --shape wan-14b-720p --target v6e",
    "nothing_to_tune": "attention=dot_product --shape sdxl-64 --target v5p",
    "kernels_h200": "--shape 64,256,256,16,72 --target H200 --with fa4-jax=0.1.0",
    "kernels_on_a_masked_ring": "attention=ring --shape 1,4096,4096,8,64 --mask causal"
    " --target H200 --mesh context=4",
    "kernels_of_a_tpu": "--shape 1,4096,4096,8,64 --target v6e --kernels",
    "kernels_of_a_named_one": "attention=flash --shape sdxl-64 --kernels",
    "kernels_below_the_least": "flash_min_seq_length=4096 --shape 1,300,300,2,8 --kernels",
    "lengths_of_another_batch": "--shape 2,64,48,2,8 --mask lengths:1,2,3",
    "lengths_of_nothing": "--shape 2,64,48,2,8 --mask lengths:",
    "ids_of_another_length": "--shape 2,64,64,2,8 --mask segment-ids:9,9",
    "offline_a_gpu": "attention=flash --shape sdxl-64 --offline --target H200",
    "offline_no_target": "attention=flash --shape sdxl-64 --offline",
    "offline_no_time": "attention=flash --shape sdxl-64 --offline --target v6e --time-limit 0",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_without_the_device_and_bad_input(capsys, quick, name):
    ran = run(capsys, "tune", *ELSEWHERE[name].split())
    assert not quick.exists()
    check_golden(f"cli/tune/{name}", ran.text)


def test_names_of_models_stand_for_shapes(capsys, quick):
    named = run(capsys, "tune", "wan-14b-480p", "wan-cross", "--target", "H200", "attention=auto")
    shapes = ["--shape", "wan-14b-480p", "--shape", "wan-cross"]
    assert named == run(capsys, "tune", "attention=auto", *shapes, "--target", "H200")
    assert named.status == 0 and named.out.startswith("wan-14b-480p: kernels, one device's B=1")


@pytest.mark.parametrize("command", ["explain", "check"])
@pytest.mark.parametrize("mask", ["lengths:9,512", "segment-ids:100,412"])
def test_masks_of_arrays_are_spelt_for_plans_too(capsys, command, mask):
    words = ["attention=auto", "--target", "H200", "--shape", "2,512,512,4,64", "--mask", mask]
    ran = run(capsys, command, *words)
    kind = "KeyPadding(int32[2])" if mask.startswith("lengths") else "Segments(int32[1,512], "
    assert ran.status == 0 and kind in ran.out


def test_another_target_takes_nothing_of_this_machine(capsys, quick):
    run(capsys, "tune", *SMALL, "--forward")
    assert Target.here().kernel_times and not Target.named("cpu").kernel_times
    assert "measured here" not in ma.plan(small_call(), target=Target.named("cpu")).because
