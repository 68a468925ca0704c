"""The file of tuned sizes: plans that use it, and damaged files."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import maxattn as ma
from maxattn import tuned
from maxattn.target import Target, _with_tuned
from maxattn.tools.model_shapes import read
from maxattn.tuned.kernels import CallTimes
from tests.golden_text import check_golden
from tests.kernel_of import blocks_of, memory_efficient
from tests.tools.tune.small import plan_here


def test_sizes_reach_a_plan_inside_its_target():
    call, config = read("sdxl-64").call(), ma.AttentionConfig(attention="flash")
    sizes = (("block_q", 256), ("block_kv", 1024), ("block_kv_compute", 512))
    entry = tuned.Tuned("flash", tuned.key_of(call), sizes, 1.5, False, "tuned.json")
    target = Target.named("TPU v5p")
    known = replace(target, tuned=(entry,))
    plain, fast = (ma.plan(call, config, None, each) for each in (target, known))
    assert blocks_of(plain.kernel).block_q != 256 == blocks_of(fast.kernel).block_q
    assert any(note.endswith("1.5 ms forward; from tuned.json") for note in fast.notes)
    other = replace(target, tuned=(replace(entry, call="another"),))
    assert ma.plan(call, config, None, other).kernel == plain.kernel
    own = ma.plan(call, config.replace(flash_block_sizes={"block_q": 128}), None, known)
    assert blocks_of(own.kernel).block_q == 128


def test_winners():
    base = {"device_kind": "TPU v5p", "versions": "jax 1", "kernel": "flash", "call": "c"}
    base |= {"error": ""}
    times = [("a", 1.0, 9.0), ("b", 2.0, 5.0), ("c", 0.5, None), ("d", None, None)]
    found = [base | {"sizes": {"n": n}, "forward_ms": f, "training_ms": t} for n, f, t in times]
    others = [found[0] | {"device_kind": "TPU v4"}, found[0] | {"versions": "jax 2"}]
    (best,) = tuned.winners([*found, *others], "TPU v5p", (("jax", "1"), ("tokamax", "2")), "x")
    assert (best.sizes, best.milliseconds, best.training) == ((("n", "b"),), 5.0, True)
    forward = [m | {"training_ms": None} for m in found]
    (best,) = tuned.winners(forward, "TPU v5p", (("jax", "1"),), "x")
    assert (best.sizes, best.training) == ((("n", "c"),), False)
    assert tuned.winners(found[3:], "TPU v5p", (("jax", "1"),), "x") == ()
    packages = (("jax", "1"), ("tokamax", "2"))
    assert tuned.versions_of("tokamax_flash", packages) == "jax 1, tokamax 2"


def test_several_processes_take_none(monkeypatch):
    entry = tuned.Tuned("flash", "c", (), 1.0, False, "x")
    times = CallTimes("c", "", (), (("flash", (1.0,)),))
    here = Target.named("cpu")
    both = _with_tuned.__wrapped__(here, (entry,), (times,))
    assert (both.tuned, both.kernel_times) == ((entry,), (times,)) and both.untuned() == here
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert _with_tuned.__wrapped__(here, (entry,), (times,)) == here


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
NO_SIZES = (
    *([1], {}, {"hardware": "tpu"}, {"use_base2_exp": True}),
    *({"query_chunk_size": wrong} for wrong in (0, True, 1.0, "128", [128], 10**30)),
    {"flash_block_sizes": {"block_q": 128}},
)
NO_MEASUREMENTS = [
    *([], None, {}, *({"sizes": sizes} for sizes in NO_SIZES)),
    {"kernel": "flash", "sizes": {"query_chunk_size": 128}},
    {"kernel": "flash", "sizes": {"use_fused_bwd_kernel": 1}},
    *({"kernel": wrong} for wrong in ("dot_product", ["flash"])),
    *({"call": 3}, {"device_kind": None}, {"versions": {}}, {"error": 3}),
    *({"forward_ms": wrong} for wrong in ("1", True, -1.0, float("nan"))),
    *({"training_ms": wrong} for wrong in (float("inf"), [1])),
]


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


def test_what_is_no_file_is_ignored(cache):
    os.mkfifo(cache)
    plan_here()
    cache.unlink()
    cache.mkdir()
    plan_here()
