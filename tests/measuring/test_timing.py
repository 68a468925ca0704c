"""Timing: programs in turns, and short calls with the device's own profile."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.measuring import timing
from maxattn.measuring.timing import (
    Event,
    TimedFunction,
    TimedProgram,
    compile_all,
    events_of,
    in_order,
    runs_of,
    seconds_by_record,
)

NAMES = {"jit_a", "jit_b"}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ENTRIES", 1 << 16)


def test_turns_are_in_changing_order() -> None:
    """No program follows the same one in most rounds."""
    for n in range(3, 9):
        rounds = [in_order(i, list(range(n))) for i in range(timing.ROUNDS)]
        assert all(sorted(each) == list(range(n)) for each in rounds)
        assert max(Counter(pairwise(chain(*rounds))).values()) <= 3
    assert [in_order(i, [0, 1])[0] for i in range(4)] == [0, 1, 1, 0]


def test_few_calls_are_queued_on_several_devices() -> None:
    """XLA's CPU backend deadlocks and aborts with about fifty queued programs with collectives."""
    assert timing.rounds_and_calls(1e-6, 1.0) == (timing.ROUNDS, timing.ON_SEVERAL)


# ---- by the device's record ----------------------------------------------------------------------


def record(at: int, *rows: tuple[str, float, float]) -> list[Event]:
    """Return events of (program, start, end), each 100 ns later per `at`."""
    return [Event(program, s + 100 * at, e + 100 * at) for program, s, e in rows]


def test_a_record_is_split_by_programs() -> None:
    """Times include the gaps between kernels, and kernels that belong to no program."""
    passes = [("jit_passes", 0, 20), ("jit_passes", 20, 30)]
    a = [("jit_a", 40, 50), ("", 52, 60), ("jit_a", 62, 70)]
    b = [("jit_b", 40, 55)]
    runs = [record(at, *passes, *run) for at, run in enumerate((a, a, b))]
    events = [event for run in reversed(runs) for event in run]
    found = [(run.name, run.seconds, run.waits) for run in runs_of(events, NAMES)]
    expected = [("jit_a", 30e-9, 2e-9), ("jit_a", 30e-9, 2e-9), ("jit_b", 15e-9, 0.0)]
    assert found == [(n, pytest.approx(s), pytest.approx(w)) for n, s, w in expected]


def test_no_device_waits_while_another_kernel_runs() -> None:
    events = record(0, ("jit_a", 0, 50), ("jit_a", 10, 20), ("jit_a", 57, 60))
    (run,) = runs_of(events, NAMES)
    assert run.waits == pytest.approx(7e-9)


@pytest.fixture(scope="module")
def programs() -> list[TimedProgram]:
    """A slow function and a fast one, with three calls each."""
    sets = [(jnp.full((512, 512), 0.01 * i),) for i in range(3)]
    fs = {"dear": lambda x: x @ x @ x @ x, "cheap one": lambda x: x + 1}
    made = compile_all([TimedFunction(f, lambda: sets, name=name) for name, f in fs.items()])
    for program, f in zip(made, fs.values(), strict=True):
        np.testing.assert_allclose(program.compiled(sets)[2], f(*sets[2]), 1e-5)
    return made


def test_the_record_has_the_seconds_of_a_call(programs: list[TimedProgram], caplog) -> None:
    assert [program.record for program in programs] == ["jit_dear", "jit_cheap_one"]
    dear, cheap = seconds_by_record(programs, 5)
    assert len(dear) == len(cheap) == 5 and min(*dear, *cheap) > 0 and not caplog.records


@pytest.mark.parametrize(("late", "covers"), [(0, 1), (2, 3), (99, 6)])
def test_more_passes_are_queued_if_the_host_is_late(
    late: int, covers: int, programs: list[TimedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first profiles the device waits for the host; the last profile counts."""
    records = iter(range(99))

    def runs(events: Any, names: set[str]) -> list[timing.Run]:
        at = next(records)
        waits = 2 * timing.LATE if at < late else timing.LATE
        return [timing.Run(p.record, 3.0 * (at + 1), waits) for p in programs]

    monkeypatch.setattr(timing, "runs_of", runs)
    monkeypatch.setattr(timing, "recorded", lambda run: [])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert seconds_by_record(programs, 1) == [[covers]] * 2
    assert next(records) == covers


def test_without_a_record_the_host_s_times_are_taken(
    programs: list[TimedProgram],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(timing, "recorded", lambda run: [])
    monkeypatch.setattr(TimedProgram, "seconds", lambda self, calls: 6.0)
    with caplog.at_level(logging.WARNING):
        assert seconds_by_record(programs, 2) == [[2.0, 2.0]] * 2, "6 s, of three calls"
    assert "the host measures the times" in caplog.text


def test_passes_over_memory_are_not_dropped() -> None:
    """Each pass reads every entry and the previous pass' result."""
    x, expected = jnp.linspace(0.0, 1.0, timing.ENTRIES, dtype=jnp.float32), np.float32(0)
    for _ in range(timing.PASSES):
        expected = np.abs(np.asarray(x) - expected).max()
    assert timing.passes_over(x) == expected
    hlo = timing.passes_over.lower(x).as_text()
    assert hlo.count("stablehlo.reduce") >= timing.PASSES


@pytest.mark.parametrize("lines", [("Stream #13(Compute)", "Stream #17(MemcpyP2P)"), ("XLA Ops",)])
def test_the_first_device_s_kernels_are_read(lines: tuple[str, ...]) -> None:
    def plane(name: str, *lines: str) -> SimpleNamespace:
        stats = [("hlo_op", f"fusion.{name[-1]}"), ("hlo_module", f"jit_step{name[-1]}(7)")]
        event = SimpleNamespace(name="fusion", start_ns=1.0, duration_ns=2.0, stats=stats)
        return SimpleNamespace(
            name=name, lines=[SimpleNamespace(name=line, events=[event]) for line in lines]
        )

    kind = "TPU" if "XLA Ops" in lines else "GPU"
    named = (f"/device:{kind}:1", f"/device:{kind}:0", "/device:CUSTOM:Megascale:0", "/host:CPU")
    record = SimpleNamespace(planes=[plane(n, *lines, "Steps", "Async XLA Ops") for n in named])
    assert list(events_of(record)) == [("jit_step0", 1.0, 3.0)] * len(lines)
