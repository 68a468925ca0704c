"""The child process of `maxattn compile`: whatever it is, there is an outcome or a refusal."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maxattn import masks
from maxattn.config import AttentionConfig
from maxattn.errors import ConfigError, Unsupported
from maxattn.tools.cli.masks import read_mask
from maxattn.tools.compile.child import outcome_of
from maxattn.tools.compile.job import (
    PYTHON_VARIABLE,
    CompileJob,
    Outcome,
    read_outcome,
    run_in_child,
)
from maxattn.tools.compile.job_json import job_values, text_of
from maxattn.tools.model_shapes import read
from tests.golden_text import check_golden
from tests.tools.cli.command import run

JOB = CompileJob("v5e:1x1", AttentionConfig(), read("1,64,64,1,64"))


def program(folder: Path, text: str) -> str:
    """Write a program that stands for the python."""
    path = folder / "python"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("kind", ["missing", "no_program", "a_folder", "not_executable"])
def test_a_python_that_cannot_be_run_is_refused(kind, tmp_path, monkeypatch):
    python = program(tmp_path, "neither a script nor a program")
    if kind == "not_executable":
        Path(python).chmod(0o600)
    named = {"missing": "/nope/python", "a_folder": str(tmp_path)}.get(kind, python)
    monkeypatch.setenv(PYTHON_VARIABLE, named)
    with pytest.raises(ConfigError) as error:
        run_in_child(JOB, 10)
    assert error.value.setting == PYTHON_VARIABLE
    if kind == "missing":
        check_golden("cli/compile/no_python", str(error.value))


def test_a_python_without_libtpu_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    outcome = outcome_of(JOB, tmp_path)
    assert outcome.ending == "refused"
    assert outcome.message.startswith("compile: libtpu is not installed\n")
    assert f"and {sys.executable} has none" in outcome.message
    assert PYTHON_VARIABLE in outcome.message


@pytest.mark.parametrize("limit", ["nan", "inf", "-inf", "0", "-1", "1e300"])
def test_a_time_limit_is_a_time(limit, capsys, monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, "/nope/python")
    words = ["--target", "v5e:1x1", "--shape", "1,64,64,1,64", f"--time-limit={limit}"]
    ran = run(capsys, "compile", *words)
    assert ran.status == 1 and ran.err.startswith("--time-limit: ")
    if limit == "nan":
        check_golden("cli/compile/time_limit", ran.err)


@pytest.mark.parametrize("slices", ["0", str(10**30)])
def test_slices_are_bounded(slices, capsys):
    words = ["--target", "v5e:1x1", "--shape", "1,64,64,1,64", "--slices", slices]
    assert run(capsys, "compile", *words).status == 1


WHOLE = {"ending": "refused", "message": "no", "seconds": 1.5, "mesh": {"data": 1}}
NO_OUTCOMES: dict[str, Any] = {
    "nothing": "",
    "half": json.dumps(WHOLE)[:20],
    "a_list": "[]",
    "empty": "{}",
    "another_ending": json.dumps(WHOLE | {"ending": "done"}),
    "an_ending_that_is_none": json.dumps(WHOLE | {"ending": ["refused"]}),
    "another_key": json.dumps(WHOLE | {"more": 1}),
    "another_type": json.dumps(WHOLE | {"memory": 3}),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", NO_OUTCOMES)
def test_what_is_no_outcome_is_a_crash(kind, tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_text(NO_OUTCOMES[kind])
    script = f'#!/bin/sh\ncat > /dev/null\ncp "{text}" "$3"\necho what was said\nexit 3\n'
    monkeypatch.setenv(PYTHON_VARIABLE, program(tmp_path, script))
    outcome = run_in_child(JOB, 60)
    assert outcome.ending == "crashed" and "what was said" in outcome.message
    if kind == "half":
        check_golden("cli/compile/half_an_outcome", outcome.message)


def test_an_outcome_is_read(tmp_path):
    path = tmp_path / "outcome.json"
    path.write_text(json.dumps(WHOLE))
    assert read_outcome(path) == Outcome(**WHOLE)
    assert read_outcome(tmp_path / "nothing") is None


CONFIGS = {
    "plain": AttentionConfig(),
    "ring": AttentionConfig(attention="ring", ici_context_parallelism=4),
    "foreign spelling": AttentionConfig(attention="tokamax_ring"),
    "gpu spelling": AttentionConfig(ici_fsdp_batch_parallelism=2, ici_fsdp_parallelism=2),
    "sizes": AttentionConfig(flash_block_sizes={"block_q": 256, "use_fused_bwd_kernel": True}),
}


@pytest.mark.parametrize(
    "mask",
    [
        *("full", "causal", "video:4,16,2,2,1", "teacher:2,16,1,2,1", "causal+window:5,5"),
        "segments:20,30,14",
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_job_goes_through_json_as_it_is(name, mask):
    tree = read_mask(mask) | ~masks.KeyLimit(3)
    for each in (read_mask(mask), tree):
        shape = replace(read("1,64,64,4,64,2"), mask=each)
        job = CompileJob("v5e:2x2", CONFIGS[name], shape, True, False, 3, 2)
        found = CompileJob(**job_values(text_of(job)))
        assert found == job and hash(found.config) == hash(job.config)
        assert found.config.changed == job.config.changed


def test_a_mask_that_a_child_cannot_know_is_refused():
    @masks.mask_type
    class Own(masks.PositionMask):
        offset: int | None = None

    for mask in (Own(), masks.Causal() & masks.KeyPadding([3])):
        job = replace(JOB, shape=replace(JOB.shape, mask=mask))
        with pytest.raises(Unsupported, match="goes to the compiler's process by name"):
            text_of(job)


def test_term_ends_the_compiler_too(tmp_path):
    python = program(tmp_path, f"#!/bin/sh\necho $$ > {tmp_path}/started\nexec sleep 300\n")
    words = ["--target", "v5e:1x1", "--devices", "1", "--shape", "1,64,64,1,64"]
    command = [sys.executable, "-m", "maxattn", "compile", "attention=flash", *words]
    env = os.environ | {PYTHON_VARIABLE: python}
    parent = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    started = tmp_path / "started"
    until = time.monotonic() + 60
    while not (started.is_file() and started.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    parent.send_signal(signal.SIGTERM)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == 143 and said.endswith("stopped\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
