"""`maxattn tune`: timings on this CPU, its file, plans from it, a kill; golden estimates."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import tuned
from maxattn.errors import ConfigError
from maxattn.measuring.timing import Timed
from maxattn.target import Target
from maxattn.tools.model_shapes import read
from maxattn.tools.tune import store
from tests.golden_text import check_golden
from tests.kernel_of import memory_efficient
from tests.tools.cli.command import run
from tests.tools.tune.small import BLOCKWISE, CONFIG, measurements, plan_here, small_call


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
    # bfloat16 was not tuned
    assert not any("measured on this machine" in note for note in plan.notes)
    plan = plan_here()
    kernel = memory_efficient(plan.kernel)
    assert {"query_chunk_size": kernel.query_chunk, "key_chunk_size": kernel.key_chunk} == best
    assert any("measured on this machine" in note and str(cache) in note for note in plan.notes)
    assert "sizes measured on this machine" in plan.explain()


@pytest.fixture
def quick(cache, monkeypatch):
    """A separate cache, and constant times instead of measurements."""
    timed = Timed(seconds=1e-3)
    monkeypatch.setattr("maxattn.tools.tune.kernel_times.time_sizes", lambda *_: timed)
    return cache


def test_what_the_config_sets_wins(capsys, quick):
    run(capsys, "tune", *BLOCKWISE, "--limit", "2", "--forward")
    plan = ma.plan(small_call(), CONFIG.replace(query_chunk_size=50))
    assert memory_efficient(plan.kernel).query_chunk == 50
    assert not any("measured" in note for note in plan.notes)


def test_tuned_sizes_change_no_result(cache):
    q = jax.random.normal(jax.random.key(0), (1, 300, 2, 8))
    before = ma.attention(q, q, q, config=CONFIG)
    call, here = ma.Call.of(q, q), Target.here()
    versions = tuned.versions_of(tuned.CHUNKS, here.packages)
    kept = {"device_kind": here.device_kind, "versions": versions, "call": tuned.key_of(call)}
    kept |= {"kernel": tuned.CHUNKS, "sizes": {"query_chunk_size": 70, "key_chunk_size": 90}}
    store.add(cache, kept | {"forward_ms": 1.0, "training_ms": None, "error": ""})
    assert memory_efficient(ma.plan(call, CONFIG).kernel).query_chunk == 70
    np.testing.assert_allclose(ma.attention(q, q, q, config=CONFIG), before, atol=2e-6)


def test_it_goes_on_where_it_was(capsys, quick, monkeypatch):
    run(capsys, "tune", *BLOCKWISE, "--limit", "2", "--forward")
    failed = Timed(failed="ZeroDivisionError: division by zero")
    monkeypatch.setattr("maxattn.tools.tune.kernel_times.time_sizes", lambda *_: failed)
    ran = run(capsys, "tune", *BLOCKWISE, "--limit", "3", "--forward")
    assert ran.out.count("(measured before)") == 2
    assert ran.out.count("does not run: ZeroDivisionError: division by zero") == 1
    errors = [m["error"] for m in measurements(quick)]
    assert errors == ["", "", "ZeroDivisionError: division by zero"]


def test_forward_and_training_times_add_up(capsys, quick):
    run(capsys, "tune", *BLOCKWISE, "--limit", "1", "--forward")
    assert measurements(quick)[0]["training_ms"] is None
    run(capsys, "tune", *BLOCKWISE, "--limit", "1", "--train")
    assert measurements(quick)[0]["training_ms"] > 0 and measurements(quick)[0]["forward_ms"] > 0


@pytest.mark.slow
def test_a_kill_loses_nothing(capsys, cache):
    words = ["tune", *BLOCKWISE, "--forward", "--limit"]
    command = [sys.executable, "-m", "maxattn", *words, "30"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.time() + 60
    while not (cache.exists() and len(measurements(cache)) >= 2):
        assert child.poll() is None and time.time() < limit
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = len(measurements(cache))
    assert done >= 2
    ran = run(capsys, *words, str(min(done, 3)))
    assert ran.status == 0 and ran.out.count("(measured before)") >= 2


def test_tune_says_what_it_does_with_a_damaged_file(capsys, quick):
    quick.write_text('{"version": 1, "measurements": [{}]}')
    ran = run(capsys, "tune", *BLOCKWISE, "--limit", "1", "--forward")
    line = next(line for line in ran.out.splitlines() if "damaged" in line)
    check_golden("cli/tune/put_aside", line.replace(str(quick), "tuned.json"))
    assert ran.status == 0 and len(measurements(quick)) == 1
    assert quick.with_suffix(".damaged.json").read_text() == '{"version": 1, "measurements": [{}]}'
    assert "damaged" not in run(capsys, "tune", *BLOCKWISE, "--limit", "1", "--forward").out


def test_a_wrong_limit(capsys, cache):
    assert run(capsys, "tune", *BLOCKWISE, "--limit", "0").status == 1
    assert os.environ[tuned.VARIABLE] == str(cache.parent)


# ---- where measurements are kept -----------------------------------------------------------------


def test_without_a_home_the_variable_is_named(capsys, quick, monkeypatch):
    """As in a container whose user is not in the user table."""
    monkeypatch.delenv(tuned.VARIABLE)
    monkeypatch.setattr(Path, "home", no_home)
    ran = run(capsys, "tune", *BLOCKWISE, "--limit", "1")
    check_golden("cli/tune/no_home", ran.text)
    ma.attention(*(jnp.ones((1, 8, 2, 8)),) * 3)  # which reads the cache, and needs none


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="nothing here is read-only to root")
def test_a_cache_that_cannot_be_written_is_said_once(capsys, quick, monkeypatch):
    monkeypatch.setenv(tuned.VARIABLE, "/proc/maxattn")
    ran = run(capsys, "tune", *BLOCKWISE, "--shape", "1,200,200,2,8", "--limit", "2")
    assert ran.status == 0 and ran.out.count("cannot be written") == 1
    text = re.sub(r"\d[\d.,]* ms( +)?", "# ms ", ran.out)
    text = re.sub(r"[\d.]+ times", "# times", text)
    check_golden("cli/tune/read_only", re.sub(r"(chunk_size:?) \d+", r"\1 #", text))
    assert not any(tempfile.gettempdir() in line for line in ran.out.splitlines())


def test_what_was_measured_is_read_from_a_cache_that_cannot_be_written(
    capsys, quick, monkeypatch, tmp_path
):
    run(capsys, "tune", *BLOCKWISE, "--limit", "2")
    before = quick.read_text()
    monkeypatch.setattr(
        "maxattn.tools.tune.store.unwritable",
        lambda *_: ConfigError("", "", "it may not be written", ""),
    )
    ran = run(capsys, "tune", *BLOCKWISE, "--limit", "2")
    assert ran.status == 0 and ran.out.count("(measured before)") == 2
    assert quick.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["tuned.json"]
