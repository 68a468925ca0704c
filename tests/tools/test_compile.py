"""The compiler's process: each request gets an answer or a refusal; and kernels from files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxattn import masks
from maxattn.config import AttentionConfig
from maxattn.errors import ConfigError, InputError, Unsupported
from maxattn.tools.cli import Terminated, term_interrupts
from maxattn.tools.cli.compile import report
from maxattn.tools.cli.masks import read_mask
from maxattn.tools.compile.child import outcome_of
from maxattn.tools.compile.job import CompileJob, Outcome, job_of, run_in_child, values_of
from maxattn.tools.compile.kernel_file import (
    check_kernel_job,
    read_kernel_file,
    traced_file,
)
from maxattn.tools.compile.process import (
    PYTHON_VARIABLE,
    CompilerProcess,
    CompilerStopped,
    held_signals,
)
from maxattn.tools.model_shapes import read
from maxattn.tools.tune.kernel_job import KernelJob
from maxattn.tools.tune.schedules import ScheduleCompiler
from tests.golden_text import check_golden, check_refused
from tests.packages import needs_libtpu
from tests.tools.cli.command import run

JOB = CompileJob("v5e:1x1", AttentionConfig(), read("1,64,64,1,64"))
WORDS = ["--target", "v5e:1x1", "--devices", "1", "--shape", "1,64,64,1,64"]


def program(path: Path, text: str) -> str:
    """Write a program."""
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def stands_in(folder: Path, patch: pytest.MonkeyPatch, *lines: str) -> None:
    """Replace the compiler's process by a shell script, which answers on descriptor 9."""
    text = "\n".join(('#!/bin/bash\neval "exec 9>&$4"', *lines, ""))
    patch.setenv(PYTHON_VARIABLE, program(folder / "python", text))


# ---- one compile ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["missing", "no_program", "a_folder", "not_executable"])
def test_a_python_that_cannot_be_run_is_refused(kind, tmp_path, monkeypatch):
    python = program(tmp_path / "python", "neither a script nor a program")
    if kind == "not_executable":
        Path(python).chmod(0o600)
    named = {"missing": "/nope/python", "a_folder": str(tmp_path)}.get(kind, python)
    monkeypatch.setenv(PYTHON_VARIABLE, named)
    with pytest.raises(ConfigError) as error:
        run_in_child(JOB, 10)
    assert error.value.setting == PYTHON_VARIABLE
    if kind == "missing":
        check_golden("cli/compile/no_python", str(error.value))


def test_a_long_compile_shows_its_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("maxattn.tools.compile.process.EVERY", 0.05)
    stands_in(tmp_path, monkeypatch, "sleep 0.3", 'echo \'{"ending": "failed"}\' >&9')
    ran = run(capsys, "compile", "attention=flash", *WORDS)
    assert ran.err.count("  compiling for 0 s, at most 600 (--time-limit)\n") >= 2


def test_a_python_without_libtpu_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    outcome = outcome_of(JOB, tmp_path)
    assert outcome.ending == "refused"
    assert outcome.message.startswith("compile: libtpu is not installed\n")
    assert f"and {sys.executable} has none" in outcome.message
    assert PYTHON_VARIABLE in outcome.message
    check_refused("cli/compile/no_libtpu", Unsupported, lambda: run_in_child(JOB, 1))


LIMITS = [("--time-limit", limit) for limit in ("nan", "inf", "-inf", "0", "-1", "1e300")]


@pytest.mark.parametrize("option, value", [*LIMITS, ("--slices", "0"), ("--slices", str(10**30))])
def test_numbers_of_options_are_bounded(option, value, capsys, monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, "/nope/python")
    ran = run(capsys, "compile", *WORDS, f"{option}={value}")
    assert ran.status == 1 and ran.err.lstrip("-").startswith(f"{option[2:]}: ")
    if value == "nan":
        check_golden("cli/compile/time_limit", ran.err)


WHOLE = {"ending": "refused", "message": "no", "seconds": 1.5, "mesh": {"data": 1}}
NO_OUTCOMES: dict[str, Any] = {
    "nothing": "",
    "half": json.dumps(WHOLE)[:20],
    "a_list": "[]\n",
    "empty": "{}\n",
    "another_ending": json.dumps(WHOLE | {"ending": "done"}) + "\n",
    "an_ending_that_is_none": json.dumps(WHOLE | {"ending": ["refused"]}) + "\n",
    "another_key": json.dumps(WHOLE | {"more": 1}) + "\n",
    "another_type": json.dumps(WHOLE | {"memory": 3}) + "\n",
    "deep": "[" * 100_000 + "\n",
}


@pytest.mark.parametrize("kind", NO_OUTCOMES)
def test_what_is_no_outcome_is_a_crash(kind, tmp_path, monkeypatch):
    (tmp_path / "text").write_text(NO_OUTCOMES[kind])
    texts = "echo what it printed", "read request", f'cat "{tmp_path}/text" >&9', "exit 3"
    stands_in(tmp_path, monkeypatch, *texts)
    outcome = run_in_child(JOB, 60)
    assert outcome.ending == "crashed" and "what it printed" in outcome.message
    if kind == "half":
        check_golden("cli/compile/half_an_outcome", outcome.message)


def test_an_outcome_is_read(tmp_path, monkeypatch):
    stands_in(tmp_path, monkeypatch, "read request", f"echo '{json.dumps(WHOLE)}' >&9")
    assert run_in_child(JOB, 60) == Outcome(**WHOLE)


def test_the_limit_ends_the_compiler(tmp_path, monkeypatch, capsys):
    stands_in(tmp_path, monkeypatch, "sleep 60")
    ran = run(capsys, "compile", *WORDS, "--time-limit", "0.2")
    assert ran.status == 1 and ran.out.endswith(
        "no result after 0.2 s: raise --time-limit, or compile a shorter shape\nnot compiled\n"
    )
    # It does not read: a request that is longer than a pipe holds waits no longer.
    with CompilerProcess("compile", dumps=False) as process, pytest.raises(CompilerStopped):
        process.ask({"long": "x" * 10**6}, 0.2)


CONFIGS = {
    "plain": AttentionConfig(),
    "ring": AttentionConfig(attention="ring", ici_context_parallelism=4),
    "foreign spelling": AttentionConfig(attention="tokamax_ring"),
    "gpu spelling": AttentionConfig(ici_fsdp_batch_parallelism=2, ici_fsdp_parallelism=2),
    "sizes": AttentionConfig(flash_block_sizes={"block_q": 256, "use_fused_bwd_kernel": True}),
}
MASKS = (
    *("full", "causal", "video:4,16,2,2,1", "teacher:2,16,1,2,1", "causal+window:5,5"),
    "segments:20,30,14",
)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_job_goes_through_json_as_it_is(name):
    for mask in map(read_mask, MASKS):
        for each in (mask, mask | ~masks.KeyLimit(3)):
            shape = replace(read("1,64,64,4,64,2"), mask=each)
            job = CompileJob("v5e:2x2", CONFIGS[name], shape, True, False, 3, 2)
            found = job_of(json.loads(json.dumps(values_of(job))))
            assert found == job and hash(found.config) == hash(job.config)
            assert found.config.changed == job.config.changed


def test_a_mask_that_a_child_cannot_know_is_refused():
    @masks.mask_type
    class Own(masks.PositionMask):
        offset: int | None = None

    for mask in (Own(), masks.Causal() & masks.KeyPadding([3])):
        job = replace(JOB, shape=replace(JOB.shape, mask=mask))
        with pytest.raises(Unsupported, match="a mask is sent to the compiler"):
            values_of(job)


# ---- kernels, one after the other ----------------------------------------------------------------

VERSIONS = {"libtpu": "0.0.99", "jax": "0.12.0.1"}
KERNEL = KernelJob("TPU v6e", "flash", "fwd", (512, 512, 512), 128, "bfloat16", True)


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("sleep 60", "timeout: no result after 0.2 s"),
        ("kill -9 $$", "crashed: the compiler's process ended with status -9"),
        ('echo \'{"failed": "x"}\' >&9; read more', "x"),
    ],
)
def test_a_kernel_without_an_answer_costs_the_process_alone(tmp_path, monkeypatch, then, why):
    versions = f"read request; echo '{json.dumps(VERSIONS)}' >&9"
    stands_in(tmp_path, monkeypatch, versions, "read kernel", then)
    with ScheduleCompiler(0.2) as compiler:
        assert compiler.versions == VERSIONS
        found = [compiler.answer(KERNEL)["failed"] for _ in range(2)]
    assert found == [why] * 2 or (why == "x" and found[0] == why)


def test_without_libtpu_there_are_no_schedules(tmp_path, monkeypatch):
    stands_in(tmp_path, monkeypatch, "read request", 'echo \'{"jax": "1"}\' >&9')
    with ScheduleCompiler(1) as compiler, pytest.raises(Unsupported, match="it has no libtpu"):
        _ = compiler.versions


# ---- signals -------------------------------------------------------------------------------------


def test_term_ends_the_compiler_too(tmp_path):
    text = f"#!/bin/sh\necho $$ > {tmp_path}/started\nexec sleep 300\n"
    command = [sys.executable, "-m", "maxattn", "compile", "attention=flash", *WORDS]
    env = os.environ | {PYTHON_VARIABLE: program(tmp_path / "python", text)}
    parent = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    started, until = tmp_path / "started", time.monotonic() + 60
    while not (started.is_file() and started.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    parent.send_signal(signal.SIGTERM)
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == 143 and err.endswith("stopped\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_signal_acts_at_the_end_of_the_block_where_its_child_is_known() -> None:
    child = None
    with term_interrupts():
        with pytest.raises(Terminated), held_signals():
            signal.raise_signal(signal.SIGTERM)
            child = "started"
        assert child == "started"
        with pytest.raises(Terminated):  # the handler is back
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Enable Ctrl-C as in a terminal: a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_too_and_the_first_of_two_signals_wins() -> None:
    reached = []
    with term_interrupts(), pytest.raises(KeyboardInterrupt) as stopped, held_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        reached.append(1)
    assert reached and not isinstance(stopped.value, Terminated)


def test_in_other_threads_no_signal_is_held() -> None:
    before, ran = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with held_signals():
            ran.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with held_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert ran == [before] and signal.getsignal(signal.SIGTERM) is before


# ---- kernels of files ----------------------------------------------------------------------------

SHAPE = read("1,1024,1024,2,128")
FILE = """
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from beside import HEADS_FIRST

def attention(q, k, v, config):
    q, k, v = (x.transpose(HEADS_FIRST) for x in (q, k, v))
    return flash_attention(q, k, v).transpose(HEADS_FIRST)

def flat(q, k, v, config):
    split = lambda x: x.reshape(*x.shape[:2], 2, 128)
    return attention(split(q), split(k), split(v), config).reshape(q.shape)

def weighed(q, k, v, config):
    return q[..., :1] + v

def turned(q, k, v, config):
    return q.transpose(0, 2, 1, 3)

def broken(q, k, v, config):
    return q + config.flash_block_sizes.block_q_of_mine

SIZE = 3
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("HEADS_FIRST = 0, 2, 1, 3\n")
    (tmp_path / "theirs.py").write_text(FILE)
    (tmp_path / "wrong.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "notes.txt").write_text("attention\n")
    return tmp_path


def of_file(text: str, **changes: Any) -> CompileJob:
    made = CompileJob("v6e:1x1", AttentionConfig(), SHAPE, kernel_file=text, estimate=True)
    return replace(made, **changes)


def refusals(path: Path, *calls: Any) -> str:
    """Return the refusals of several calls, without the folder."""
    texts = []
    for call in calls:
        with pytest.raises(InputError) as refused:
            call()
        texts.append(str(refused.value).replace(str(path), "."))
    return "\n".join(texts)


def test_what_is_no_function_of_a_file(path: Path) -> None:
    texts = ("kernel.py", f"{path}/theirs.py:", f"{path}/theirs.py:a b", "not_there.py:attention")
    found = refusals(path, *(lambda text=text: read_kernel_file(text) for text in texts))
    check_golden("cli/compile/kernel_file_names", found)
    assert read_kernel_file(f"{path}/theirs.py:attention") == f"{path}/theirs.py:attention"


def test_what_a_file_does_not_hold(path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    names = (
        *("theirs.py:attentoin", "theirs.py:SIZE", "wrong.py:attention", "notes.txt:attention"),
        *("theirs.py:broken", "theirs.py:turned"),
    )
    jobs = [of_file(f"{path}/{name}") for name in names]
    found = refusals(path, *(lambda j=j: traced_file(j, mesh) for j in jobs))
    check_golden("cli/compile/kernel_file_refused", found)


def test_what_a_function_does_not_compute(path: Path) -> None:
    masked = replace(SHAPE, mask=masks.Causal())
    changes: list[dict[str, Any]] = [
        {"module": True},
        {"shape": masked, "training": True},
        {"visited": (3, 1), "estimate": False},
        {"topology": "v6e:2x2"},
    ]
    jobs = [of_file("theirs.py:attention", **change) for change in changes]
    found = refusals(path, *(lambda job=job: check_kernel_job(job, 4) for job in jobs))
    check_golden("cli/compile/kernel_file_computes", found)


def test_flat_arrays_of_a_function(path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    traced = traced_file(of_file(f"{path}/theirs.py:flat", flat=True), mesh)
    (out,) = jax.tree.leaves(traced.out_info)
    assert out.shape == (1, 1024, 256)
    narrow = replace(SHAPE, value_dim=64)
    traced = traced_file(of_file(f"{path}/theirs.py:weighed", shape=narrow), mesh)
    assert jax.tree.leaves(traced.out_info)[0].shape == (1, 1024, 2, 64)
    job = of_file("theirs.py:flat", flat=True, visited=(28, 8))
    assert job_of(json.loads(json.dumps(values_of(job)))) == job


@needs_libtpu
def test_the_estimate_of_a_kernel_of_somebody_else(path: Path) -> None:
    one = of_file(f"{path}/theirs.py:attention")
    outcome = run_in_child(one, 120)
    (kernel,) = outcome.estimate["kernels"]
    assert kernel["flops"] == 4 * 2 * 1024 * 1024 * 128
    text = report(one, outcome)
    assert text.startswith("1,1024,1024,2,128: theirs.py:attention, for v6e:1x1")
    assert re.search(r"kernel  \S+: [\d.e-]+ .*TFLOP/s, .* estimated by libtpu", text)


@needs_libtpu
def test_a_training_step_of_it_has_no_rate(path: Path) -> None:
    outcome = run_in_child(of_file(f"{path}/theirs.py:attention", training=True), 240)
    kernels = outcome.estimate["kernels"]
    assert len(kernels) > 1 and not any(kernel["flops"] for kernel in kernels)
