"""`maxattn tune`: real timings on this CPU, what is kept, what plans make of it, a kill; estimates
as golden text.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import maxattn as ma
from maxattn import tuned
from maxattn.kernels import KERNELS
from maxattn.masks import BlockSlidingWindow
from maxattn.target import Target, _with_tuned
from maxattn.tools.model_shapes import changed, read
from maxattn.tools.tune import store
from maxattn.tools.tune.candidates import candidates
from maxattn.tools.tune.measure import milliseconds
from tests.golden_text import check_golden
from tests.kernel_of import blocks_of, memory_efficient
from tests.tools.cli.command import run

BLOCKWISE = [
    "attention=dot_product",
    "use_memory_efficient_attention=true",
    "--shape",
    "1,300,300,2,8",
    "--dtype",
    "f32",
]
CONFIG = ma.AttentionConfig(attention="dot_product", use_memory_efficient_attention=True)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of its own, and a short timing."""
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    monkeypatch.setattr("maxattn.tools.tune.measure.SECONDS", 0.01)
    monkeypatch.chdir(Path(__file__).parents[3])
    return tmp_path / "tuned.json"


def measurements(path: Path) -> list[dict]:
    return json.loads(path.read_text())["measurements"]


def test_a_real_tune(capsys, cache):
    ran = run(capsys, "tune", *BLOCKWISE, "--limit", "2")
    assert ran.status == 0
    first, *each = ran.err.splitlines()
    assert first.endswith("on cpu: no accelerator is here, and long shapes take minutes to hours")
    assert [line.split()[0] for line in each] == ["1/2", "2/2"]
    found = measurements(cache)
    assert len(found) == 2 and all(m["forward_ms"] > 0 and m["training_ms"] > 0 for m in found)
    text = re.sub(r"\d[\d.,]* ms( +)?", "# ms ", ran.out.replace(str(cache), "tuned.json"))
    text = re.sub(r"[\d.]+ times", "# times", text)
    check_golden("cli/tune/cpu", re.sub(r"(chunk_size:?) \d+", r"\1 #", text))
    best = min(found, key=lambda m: m["training_ms"])["sizes"]
    plan = ma.plan(read("1,300,300,2,8").call(), CONFIG)
    assert not any(
        "measured on this machine" in note for note in plan.notes
    )  # bfloat16 was not tuned
    plan = ma.plan(changed(read("1,300,300,2,8"), None, "f32", None, None).call(), CONFIG)
    kernel = memory_efficient(plan.kernel)
    assert {"query_chunk_size": kernel.query_chunk, "key_chunk_size": kernel.key_chunk} == best
    assert any("measured on this machine" in note and str(cache) in note for note in plan.notes)
    assert "sizes measured on this machine" in plan.explain()


def test_what_the_config_sets_wins(capsys, cache):
    run(capsys, "tune", *BLOCKWISE, "--limit", "2", "--forward")
    call = changed(read("1,300,300,2,8"), None, "f32", None, None).call()
    plan = ma.plan(call, CONFIG.replace(query_chunk_size=50))
    assert memory_efficient(plan.kernel).query_chunk == 50
    assert not any("measured" in note for note in plan.notes)


def test_tuned_sizes_change_no_result(cache):
    q = jax.random.normal(jax.random.key(0), (1, 300, 2, 8))
    before = ma.attention(q, q, q, config=CONFIG)
    call = ma.Call.of(q, q)
    add(cache, call, {"query_chunk_size": 70, "key_chunk_size": 90}, 1.0)
    assert memory_efficient(ma.plan(call, CONFIG).kernel).query_chunk == 70
    np.testing.assert_allclose(ma.attention(q, q, q, config=CONFIG), before, atol=2e-6)


def add(
    path: Path,
    call: ma.Call,
    sizes: dict,
    forward: float | None,
    kernel: str = tuned.CHUNKS,
    **other,
) -> None:
    here = Target.here()
    identity = {
        "device_kind": here.device_kind,
        "versions": tuned.versions_of(kernel, here.packages),
        "kernel": kernel,
        "call": tuned.key_of(call),
        "sizes": sizes,
        "forward_ms": forward,
        "training_ms": None,
        "error": "",
    }
    store.add(path, identity | other)


def test_it_goes_on_where_it_was(capsys, cache, monkeypatch):
    run(capsys, "tune", *BLOCKWISE, "--limit", "2", "--forward")
    monkeypatch.setattr("maxattn.tools.cli.tune._time", lambda *_: 1 / 0)
    ran = run(capsys, "tune", *BLOCKWISE, "--limit", "3", "--forward")
    assert ran.out.count("(measured before)") == 2
    assert ran.out.count("does not run: ZeroDivisionError: division by zero") == 1
    assert [m["error"] for m in measurements(cache)] == [
        "",
        "",
        "ZeroDivisionError: division by zero",
    ]


def test_forward_and_training_times_add_up(capsys, cache):
    run(capsys, "tune", *BLOCKWISE, "--limit", "1", "--forward")
    assert measurements(cache)[0]["training_ms"] is None
    run(capsys, "tune", *BLOCKWISE, "--limit", "1", "--train")
    assert measurements(cache)[0]["training_ms"] > 0 and measurements(cache)[0]["forward_ms"] > 0


def test_a_kill_loses_nothing(cache):
    words = [sys.executable, "-m", "maxattn", "tune", *BLOCKWISE, "--forward", "--limit", "30"]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.time() + 60
    while not (cache.exists() and len(measurements(cache)) >= 2):
        assert child.poll() is None and time.time() < limit
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = len(measurements(cache))
    assert done >= 2
    ran = subprocess.run([*words[:-1], str(min(done, 3))], capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.count("(measured before)") >= 2


# ---- the file and the plan -----------------------------------------------------------------------


def test_sizes_reach_a_plan_inside_its_target():
    call, config = read("sdxl-64").call(), ma.AttentionConfig(attention="flash")
    sizes = (("block_q", 1024), ("block_kv", 1024), ("block_kv_compute", 512))
    entry = tuned.Tuned("flash", tuned.key_of(call), sizes, 1.5, False, "tuned.json")
    target = Target.named("TPU v5p")
    plain, fast = (
        ma.plan(call, config, None, t) for t in (target, replace(target, tuned=(entry,)))
    )
    assert (blocks_of(plain.kernel).block_q, blocks_of(fast.kernel).block_q) == (512, 1024)
    assert any(note.endswith("1.5 ms forward; from tuned.json") for note in fast.notes)
    other = replace(target, tuned=(replace(entry, call="another"),))
    assert ma.plan(call, config, None, other).kernel == plain.kernel
    own = ma.plan(
        call,
        config.replace(flash_block_sizes={"block_q": 256}),
        None,
        replace(target, tuned=(entry,)),
    )
    assert blocks_of(own.kernel).block_q == 256


def test_winners():
    base = {
        "device_kind": "TPU v5p",
        "versions": "jax 1",
        "kernel": "flash",
        "call": "c",
        "error": "",
    }
    times = [("a", 1.0, 9.0), ("b", 2.0, 5.0), ("c", 0.5, None), ("d", None, None)]
    found = [base | {"sizes": {"n": n}, "forward_ms": f, "training_ms": t} for n, f, t in times]
    others = [found[0] | {"device_kind": "TPU v4"}, found[0] | {"versions": "jax 2"}]
    (best,) = tuned.winners([*found, *others], "TPU v5p", (("jax", "1"), ("tokamax", "2")), "x")
    assert (best.sizes, best.milliseconds, best.training) == ((("n", "b"),), 5.0, True)
    (best,) = tuned.winners(
        [m | {"training_ms": None} for m in found], "TPU v5p", (("jax", "1"),), "x"
    )
    assert (best.sizes, best.training) == ((("n", "c"),), False)
    assert tuned.winners(found[3:], "TPU v5p", (("jax", "1"),), "x") == ()
    assert (
        tuned.versions_of("tokamax_flash", (("jax", "1"), ("tokamax", "2"))) == "jax 1, tokamax 2"
    )


def test_without_a_home_there_is_no_cache(monkeypatch):
    monkeypatch.delenv(tuned.VARIABLE)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert tuned.table_of("cpu", ()) == ()


def test_several_processes_take_none(monkeypatch):
    entry = tuned.Tuned("flash", "c", (), 1.0, False, "x")
    assert _with_tuned.__wrapped__(Target.named("cpu"), (entry,)).tuned == (entry,)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert _with_tuned.__wrapped__(Target.named("cpu"), (entry,)).tuned == ()


SOUND = {
    "device_kind": "cpu",
    "versions": "jax 1",
    "kernel": tuned.CHUNKS,
    "call": "c",
    "sizes": {"query_chunk_size": 128, "key_chunk_size": 128},
    "forward_ms": 1.0,
    "training_ms": None,
}
NO_FILES = {
    "empty": "",
    "open": "{",
    "list": "[]",
    "text": '"measurements"',
    "version": '{"version": 9, "measurements": []}',
    "true_version": '{"version": true, "measurements": []}',
    "no_list": '{"version": 1, "measurements": {"a": 1}}',
    "deep": "[" * 100_000,
    "deep_inside": '{"version": 1, "measurements": [' + "[" * 500 + "]" * 500 + "]}",
    "digits": '{"version": ' + "9" * 5000 + "}",
    "twice": '{"version": 1, "version": 1, "measurements": []}',
    "bytes": "\ud800",
}
NO_MEASUREMENTS = [
    [],
    None,
    {},
    {"sizes": [1]},
    {"sizes": {}},
    {"sizes": {"query_chunk_size": 0}},
    {"sizes": {"query_chunk_size": True}},
    {"sizes": {"query_chunk_size": 1.0}},
    {"sizes": {"query_chunk_size": "128"}},
    {"sizes": {"query_chunk_size": [128]}},
    {"sizes": {"query_chunk_size": 10**30}},
    {"sizes": {"hardware": "tpu"}},
    {"sizes": {"use_base2_exp": True}},
    {"sizes": {"flash_block_sizes": {"block_q": 128}}},
    {"kernel": "flash", "sizes": {"query_chunk_size": 128}},
    {"kernel": "flash", "sizes": {"use_fused_bwd_kernel": 1}},
    {"kernel": "dot_product"},
    {"kernel": ["flash"]},
    {"call": 3},
    {"device_kind": None},
    {"versions": {}},
    {"forward_ms": "1"},
    {"forward_ms": True},
    {"forward_ms": -1.0},
    {"forward_ms": float("nan")},
    {"training_ms": float("inf")},
    {"training_ms": [1]},
    {"error": 3},
]


def plan_here() -> ma.Plan:
    return ma.plan(changed(read("1,300,300,2,8"), None, "f32", None, None).call(), CONFIG)


@pytest.mark.parametrize("name", NO_FILES)
def test_a_damaged_file_is_said_once_and_ignored(cache, caplog, name):
    before = plan_here()
    cache.write_text(NO_FILES[name], encoding="utf-8", errors="surrogatepass")
    assert [plan_here(), plan_here()] == [before, before]
    (record,) = caplog.records
    said = record.getMessage()
    assert (record.name, record.levelname) == ("maxattn", "WARNING")
    assert said.count(str(cache)) == 1 and len(said) < 1000
    check_golden(f"cli/tune/damaged_{name}", said.replace(str(cache), "tuned.json"))


@pytest.mark.parametrize("wrong", NO_MEASUREMENTS, ids=str)
def test_a_damaged_measurement_alone_is_ignored(cache, caplog, wrong):
    here, q = Target.here(), ma.Call.of(*[jnp.zeros((1, 300, 2, 8))] * 2)
    facts = {"versions": tuned.versions_of(tuned.CHUNKS, here.packages), "call": tuned.key_of(q)}
    sound = SOUND | facts | {"device_kind": here.device_kind}
    fast = sound | {"sizes": {"query_chunk_size": 1, "key_chunk_size": 1}, "forward_ms": 0.5}
    wrong = fast | wrong if wrong and isinstance(wrong, dict) else wrong
    cache.write_text(json.dumps({"version": 1, "measurements": [wrong, sound, wrong]}))
    assert memory_efficient(plan_here().kernel).query_chunk == 128
    (record,) = caplog.records
    assert "2 of its 3 measurements" in record.getMessage()
    x = jnp.ones((1, 300, 2, 8))
    np.testing.assert_allclose(ma.attention(x, x, x, config=CONFIG), x, atol=1e-6)


def test_what_is_no_file_is_ignored(cache):
    os.mkfifo(cache)
    plan_here()
    cache.unlink()
    cache.mkdir()
    plan_here()


def test_tune_says_what_it_does_with_a_damaged_file(capsys, cache):
    cache.write_text('{"version": 1, "measurements": [{}]}')
    ran = run(capsys, "tune", *BLOCKWISE, "--limit", "1", "--forward")
    line = next(line for line in ran.out.splitlines() if "damaged" in line)
    check_golden("cli/tune/put_aside", line.replace(str(cache), "tuned.json"))
    assert ran.status == 0 and len(measurements(cache)) == 1
    assert cache.with_suffix(".damaged.json").read_text() == '{"version": 1, "measurements": [{}]}'
    assert "damaged" not in run(capsys, "tune", *BLOCKWISE, "--limit", "1", "--forward").out


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from([*SOUND, "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([*SOUND, "error"]), JSON, max_size=3))
def test_whatever_a_measurement_says_a_target_is_described(changes):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(tuned.VARIABLE, folder)
        here = Target.here()
        facts = {"versions": tuned.versions_of(tuned.CHUNKS, here.packages)}
        text = json.dumps({"version": 1, "measurements": [SOUND | facts | changes]})
        Path(folder, "tuned.json").write_text(text)
        assert hash(Target.here())
        plan_here()


# ---- candidates and timing -----------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kernel", ["flash", "tokamax_flash"])
def test_candidates_are_what_the_rules_leave_as_it_is(kernel, training):
    from maxattn.block_sizes import adjust
    from maxattn.config import FlashBlockSizes

    call, target = read("wan-14b-cross").call(), Target.named("TPU v6e")
    found = candidates(kernel, call, target, training, 30)
    default, _ = adjust(FlashBlockSizes(), call, kernel, target, training)
    assert (
        dict(found[0].sizes) == default.given()
        and len({c.sizes for c in found}) == len(found) == 30
    )
    for candidate in found:
        sizes, changes = adjust(
            FlashBlockSizes(**dict(candidate.sizes)), call, kernel, target, training
        )
        assert not changes and sizes.given() == dict(candidate.sizes)
    assert [c.cost for c in found[1:]] == sorted(c.cost for c in found[1:])


def test_candidates_fit_the_memory():
    """At 75,600 tokens and 40 heads the fused backward of 2048 keys a tile writes 27 GiB of parts
    of dQ.
    """
    found = candidates("flash", read("wan-14b-720p").call(), Target.named("TPU v6e"), True, 500)
    fused = [dict(c.sizes) for c in found if dict(c.sizes)["use_fused_bwd_kernel"]]
    assert all(sizes["block_kv_dkv"] > 2048 for sizes in fused)
    assert [
        c
        for c in candidates(
            "flash", read("wan-14b-720p").call(), Target.named("TPU v5p"), True, 500
        )
        if dict(c.sizes)["use_fused_bwd_kernel"]
    ]


def test_steps_under_a_mask_are_those_that_are_visited():
    plain = changed(read("1,2048,2048,2,64"), None, None, None, None)
    window = replace(plain, mask=BlockSlidingWindow(256, 2))
    by_sizes = {
        c.sizes: c for c in candidates("flash", plain.call(), Target.named("TPU v6e"), False, 500)
    }
    for candidate in candidates("flash", window.call(), Target.named("TPU v6e"), False, 20):
        assert candidate.steps <= by_sizes[candidate.sizes].steps
    (small,) = (
        c
        for c in candidates("flash", window.call(), Target.named("TPU v6e"), False, 500)
        if dict(c.sizes) == {"block_q": 256, "block_kv": 256, "block_kv_compute": 256}
    )
    assert small.steps == 8 + 7  # eight blocks see themselves, seven the one before


@pytest.mark.parametrize("training", [True, False])
def test_the_timing_runs_a_tpu_kernel_in_interpret_mode(training):
    call = changed(read("1,128,128,1,64"), None, "f32", None, None).call()
    kernel = KERNELS["flash"].build(
        call, ma.AttentionConfig(attention="flash"), Target.named("cpu")
    )
    assert milliseconds(kernel, call, training, 0.001) > 0


def test_the_timing_computes_what_attention_does():
    from maxattn.tools.tune.measure import _program

    call = changed(read("1,96,64,4,8,2"), None, "f32", None, None).call()
    kernel = KERNELS["memory_efficient"].build(call, CONFIG, Target.here())
    step, (q, k, v, dout) = _program(kernel, call, training=True)
    out, (dq, dk, dv) = step(q, k, v, dout)
    want, pull = jax.vjp(
        lambda q, k, v: ma.attention(q, k, v, config=CONFIG, role="cross"), q, k, v
    )
    for got, expected in zip((out, dq, dk, dv), (want, *pull(dout)), strict=True):
        np.testing.assert_allclose(jnp.asarray(got), expected, atol=2e-5)


RANKED = {
    "training_on_v6e": [
        "attention=flash",
        "--shape",
        "wan-14b-720p",
        "--target",
        "TPU v6e",
        "--limit",
        "6",
    ],
    "forward_on_a_ring": [
        "attention=ring",
        "attention_kernel=flash",
        "--shape",
        "wan-14b-480p",
        "--target",
        "TPU v5p",
        "--mesh",
        "context=4",
        "--forward",
        "--limit",
        "6",
    ],
    "nothing_to_tune": ["attention=dot_product", "--shape", "sdxl-64", "--target", "TPU v5p"],
    "window": ["attention=flash", "--shape", "swba-1560x7", "--target", "TPU v5e", "--limit", "5"],
}


@pytest.mark.parametrize("name", RANKED)
def test_without_the_device_it_ranks(capsys, cache, name):
    ran = run(capsys, "tune", *RANKED[name])
    assert (ran.status, ran.err) == (0, "") and not cache.exists()
    check_golden(f"cli/tune/{name}", ran.out)


def test_a_wrong_limit(capsys, cache):
    assert run(capsys, "tune", *BLOCKWISE, "--limit", "0").status == 1
    assert os.environ[tuned.VARIABLE] == str(cache.parent)
