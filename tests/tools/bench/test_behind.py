"""Short calls behind passes over memory, by the device's clock."""

from __future__ import annotations

import logging
from math import isnan
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.tools.bench.grid import behind, busy
from maxattn.tools.bench.grid.behind import Behind, runs_of, seconds_behind
from maxattn.tools.bench.profile import Event

NAMES = {"jit_a", "jit_b"}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "ENTRIES", 1 << 16)


def record(*rows: tuple[str, str, float, float]) -> list[Event]:
    """Return events of (program, op, start, end)."""
    return [Event(op, op, start, end, program) for program, op, start, end in rows]


def test_a_record_is_split_by_programs() -> None:
    """Times have the gaps between kernels, and those of kernels that no program is named by."""
    passes = [("jit_passes", "p", 0, 20), ("jit_passes", "p", 20, 30)]
    a = [("jit_a", "x", 40, 50), ("", "custom", 52, 60), ("jit_a", "y", 62, 70)]
    b = [("jit_b", "x", 40, 55)]
    runs = [record(*later(at, *passes, *run)) for at, run in enumerate((a, a, b))]
    events = [event for run in reversed(runs) for event in run]
    assert list(runs_of(events, NAMES)) == [
        (name, pytest.approx(seconds), pytest.approx(waits))
        for name, seconds, waits in (
            ("jit_a", 30e-9, 2e-9),
            ("jit_a", 30e-9, 2e-9),
            ("jit_b", 15e-9, 0.0),
        )
    ]


def test_no_device_waits_while_another_kernel_runs() -> None:
    events = record(("jit_a", "x", 0, 50), ("jit_a", "y", 10, 20), ("jit_a", "z", 57, 60))
    (run,) = runs_of(events, NAMES)
    assert run.waits == pytest.approx(7e-9)


@pytest.mark.parametrize(("late", "covers"), [(0, [1]), (2, [1, 2, 3]), (99, [1, 2, 3, 4, 5, 6])])
def test_where_the_host_is_late_more_passes_stand_before(
    late: int, covers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two programs one waits, in the first so many records; what counts is the last record."""
    asked: list[int] = []

    def runs(in_turn: behind.Jobs, cover: int) -> list[behind.Run]:
        asked.append(cover)
        waits = 2 * behind.LATE if cover <= late else behind.LATE
        return [behind.Run(program.name, float(cover), waits) for program, _ in in_turn]

    monkeypatch.setattr(behind, "_recorded_runs", runs)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jobs = [(Behind(None, name), [()]) for name in ("a", "b")]
    assert behind._by_record(jobs, 3) == {name: [float(covers[-1])] * 3 for name in ("a", "b")}
    assert asked == covers


def later(at: int, *rows: tuple[str, str, float, float]) -> list[tuple[str, str, float, float]]:
    return [(name, op, start + 100 * at, end + 100 * at) for name, op, start, end in rows]


def jobs() -> list[tuple[Behind, list[tuple[jax.Array]]]]:
    """Compile a dear function and a cheap one."""
    sets = [(jnp.full((512, 512), 0.01 * i),) for i in range(3)]
    fs = {"dear": lambda x: x @ x @ x @ x, "cheap one": lambda x: x + 1}
    made = [Behind.of(jax.jit(f), sets, name) for name, f in fs.items()]
    for program, f in zip(made, fs.values(), strict=True):
        np.testing.assert_allclose(program(sets)[2], f(*sets[2]), 1e-5)
    return [(program, sets) for program in made]


def test_the_device_tells_the_seconds_of_a_call(caplog: pytest.LogCaptureFixture) -> None:
    made = jobs()
    assert [program.name for program, _ in made] == ["jit_dear", "jit_cheap_one"]
    dear, cheap = seconds_behind(made, 5)
    assert len(dear) == len(cheap) == 5 and sorted(dear)[2] > 2 * sorted(cheap)[2] > 0
    assert not caplog.records


def test_without_a_record_the_host_tells_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the passes take alone is taken off."""
    monkeypatch.setattr(behind, "recorded", lambda run: [])
    monkeypatch.setattr(behind, "queue", lambda f, x, calls: 10.0 + 6.0 * isinstance(f(x), tuple))
    with caplog.at_level(logging.WARNING):
        found = seconds_behind(jobs(), 2)
    assert found == [(2.0, 2.0)] * 2, "16 s without 10 s, of three calls"
    assert "times are the host's" in caplog.text


def test_passes_over_memory_are_not_dropped() -> None:
    """Each needs every entry, and what the one before it found."""
    x, expected = np.asarray(busy.memory()), np.float32(0)
    for _ in range(busy.PASSES):
        expected = np.abs(x - expected).max()
    assert jax.jit(lambda x: busy.passes_over(x))(busy.memory()) == expected
    hlo = jax.jit(lambda x: busy.passes_over(x)).lower(busy.memory()).as_text()
    assert hlo.count("stablehlo.reduce") >= busy.PASSES


def test_a_call_that_the_passes_hide_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 10 to 12 ms tell nothing of a call of 1 ms, and much of one of 30."""
    alone, programs = iter([10e-3, 11e-3, 12e-3]), iter([12e-3, 41e-3] * 3)

    def queue(run: Any, *_: Any) -> float:
        return next(alone if run is behind.PASSES else programs)

    monkeypatch.setattr(behind, "queue", queue)
    monkeypatch.setattr(behind, "_passes", lambda: (None, behind.PASSES))
    monkeypatch.setattr(behind, "in_order", lambda _, listed: listed)
    jobs = [(Behind(None, name), [()]) for name in ("short", "long")]
    found = behind._by_host(jobs, 3)
    assert all(isnan(x) for x in found["short"])
    assert found["long"] == pytest.approx([30e-3] * 3)
