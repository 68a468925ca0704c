"""Short calls behind passes over memory, by the device's clock."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.tools.bench import behind
from maxattn.tools.bench.behind import Behind, runs_of, seconds_behind
from maxattn.tools.bench.profile import Event
from maxattn.tools.bench.timing import in_order

NAMES = {"jit_a", "jit_b"}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "ENTRIES", 1 << 16)


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


def later(at: int, *rows: tuple[str, str, float, float]) -> list[tuple[str, str, float, float]]:
    return [(name, op, start + 100 * at, end + 100 * at) for name, op, start, end in rows]


def programs() -> tuple[list[Behind], list[tuple[jax.Array]]]:
    """Compile a dear function and a cheap one, of three calls each."""
    sets = [(jnp.full((512, 512), 0.01 * i),) for i in range(3)]
    fs = {"dear": lambda x: x @ x @ x @ x, "cheap one": lambda x: x + 1}
    made = [Behind.of(f, sets, name) for name, f in fs.items()]
    for program, f in zip(made, fs.values(), strict=True):
        np.testing.assert_allclose(program(sets)[2], f(*sets[2]), 1e-5)
    return made, sets


def test_the_device_tells_the_seconds_of_a_call(caplog: pytest.LogCaptureFixture) -> None:
    made, sets = programs()
    assert [program.name for program in made] == ["jit_dear", "jit_cheap_one"]
    dear, cheap = seconds_behind(made, sets, 5)
    assert len(dear) == len(cheap) == 5 and min(*dear, *cheap) > 0 and not caplog.records


@pytest.mark.parametrize(("late", "covers"), [(0, 1), (2, 3), (99, 6)])
def test_where_the_host_is_late_more_passes_stand_before(
    late: int, covers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first so many records the device waits; what counts is the last record."""
    records = iter(range(99))
    made, sets = programs()

    def runs(events: Any, names: set[str]) -> list[behind.Run]:
        at = next(records)
        waits = 2 * behind.LATE if at < late else behind.LATE
        return [behind.Run(p.name, 3.0 * (at + 1), waits) for p in in_order(0, made)]

    monkeypatch.setattr(behind, "runs_of", runs)
    monkeypatch.setattr(behind, "recorded", lambda run: [])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert seconds_behind(made, sets, 1) == [[covers]] * 2
    assert next(records) == covers


def test_without_a_record_the_host_tells_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(behind, "recorded", lambda run: [])
    monkeypatch.setattr(behind, "queue", lambda f, x, calls: 6.0)
    with caplog.at_level(logging.WARNING):
        assert seconds_behind(*programs(), 2) == [[2.0, 2.0]] * 2, "6 s, of three calls"
    assert "times are the host's" in caplog.text


def test_passes_over_memory_are_not_dropped() -> None:
    """Each needs every entry, and what the one before it found."""
    x, expected = jnp.linspace(0.0, 1.0, behind.ENTRIES, dtype=jnp.float32), np.float32(0)
    for _ in range(behind.PASSES):
        expected = np.abs(np.asarray(x) - expected).max()
    assert behind.passes_over(x) == expected
    hlo = behind.passes_over.lower(x).as_text()
    assert hlo.count("stablehlo.reduce") >= behind.PASSES
