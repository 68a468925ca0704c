"""Run drawn cases in a worker process until the time is up, and count them by category."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from random import Random
from typing import Any

from tests.fuzz import (
    calls,
    commands,
    configs,
    modules,
    plans,
    remedies,
    saved,
    stacked,
    streams,
    transforms,
    weights,
    writers,
)  # fmt: skip
from tests.fuzz.case import Case, Machine, Outcome
from tests.fuzz.run import run, set_up

# What draws a case of each category, and the number of its cases beside the others'.
CATEGORIES: dict[str, tuple[Callable[[Random, Machine], Case], int]] = {
    "attention": (calls.draw_alone, 10),
    "meshes": (calls.draw_on_mesh, 4),
    "transforms": (transforms.draw, 5),
    "modules": (modules.draw, 3),
    "stacked": (stacked.draw, 2),
    "streams": (streams.draw, 3),
    "plans": (plans.draw, 12),
    "remedies": (remedies.draw, 12),
    "commands": (commands.draw, 20),
    "yaml": (configs.draw, 50),
    "weights": (weights.draw_weights, 25),
    "lora": (weights.draw_lora, 25),
    "latents": (saved.draw_latents, 12),
    "checkpoints": (saved.draw_checkpoint, 2),
    "tuned": (saved.draw_tuned, 8),
    "writers": (writers.draw, 1),
}
# What a program may set before it calls maxattn, and the categories whose cases also run so.
SWITCHES = {
    "jax.config.update('jax_numpy_rank_promotion', 'raise')\n": 0.1,
    "jax.config.update('jax_enable_x64', True)\n": 0.1,
}
SWITCHED = ("attention", "meshes", "transforms", "modules", "stacked", "streams")
LIFE = 300.0  # seconds of cases for one worker: programs that it compiled stay in its memory
LATEST = 240.0  # seconds without an answer after which a worker is taken to hang
COLUMNS = ("cases", "right", "refused", "known", "failed", "seconds")


def fuzz(names: Sequence[str], seed: int, seconds: float, count: int | None) -> Iterator[Outcome]:
    """Run cases one after another, and print each failure as a snippet."""
    until, worker = time.monotonic() + seconds, Worker()
    try:
        for number, case in enumerate(_order(names, seed)):
            if (number >= count) if count is not None else (time.monotonic() > until):
                break
            if worker.seconds >= LIFE:
                worker.end()
                worker = Worker()
            outcome = worker.run(case)
            if outcome.kind == "failed":
                print(f"\n{outcome.snippet}", flush=True)
            yield outcome
    finally:
        worker.end()


def _order(names: Sequence[str], seed: int) -> Iterator[str]:
    """Yield names of cases without end, next the category with the fewest cases for its weight."""
    drawn = dict.fromkeys(names, 0)
    while True:
        name = min(names, key=lambda name: (drawn[name] + 0.5) / CATEGORIES[name][1])
        yield f"{name}:{seed * 1_000_000 + drawn[name]}"
        drawn[name] += 1


def draw(name: str, machine: Machine) -> Case:
    """Draw the case of a name, `category:seed`; on one machine it is always the same."""
    category = name.partition(":")[0]
    make, _ = CATEGORIES[category]
    case = make(Random(name), machine)
    switches = Random(f"switches of {name}")  # apart, so that they change no other draw
    some = [line for line, chance in SWITCHES.items() if switches.random() < chance]
    before = "".join(some) if category in SWITCHED else ""
    return replace(case, name=name, source=before + case.source)


class Worker:
    """A process that runs the cases whose names it receives."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._names, theirs = context.Pipe()
        self._process = context.Process(target=answer, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process ends the pipe
        self.seconds = 0.0

    def run(self, name: str) -> Outcome:
        """Run one case; if the worker hangs or dies, the case has failed and the worker ends."""
        what = f"no answer in {LATEST:g} s"
        try:
            self._names.send(name)
            if self._names.poll(LATEST):
                outcome = self._names.recv()
                self.seconds += outcome.seconds
                return outcome
        except (EOFError, OSError):
            what = "the process died"
        self.seconds = LIFE
        return Outcome(name, "failed", what, f"# {what}: make fuzz CASE={name}\n")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._names.close()


def answer(names: Any) -> None:
    """Answer each name of a case with its outcome, until the pipe closes."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # also what compilers print
    os.dup2(nothing, 2)
    machine = set_up()
    while True:
        names.send(run(draw(names.recv(), machine)))


def table(outcomes: Iterable[Outcome]) -> str:
    """Format a line for each category, and one for all."""
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        row = rows.setdefault(outcome.name.partition(":")[0], Counter())
        row.update({"cases": 1, outcome.kind: 1, "ms": round(outcome.seconds * 1000)})
        row.update([f"fault {outcome.letter}"] if outcome.letter else [])
    rows["all"] = sum(rows.values(), Counter())
    lines = [f"{'category':<12}" + "".join(f"{name:>9}" for name in COLUMNS)]
    for name, row in rows.items():
        cells = "".join(f"{row[c]:>9}" for c in COLUMNS[:-1]) + f"{row['ms'] / 1000:>9.1f}"
        known = [f"  {key}: {n}" for key, n in sorted(row.items()) if key.startswith("fault ")]
        lines.append(f"{name:<12}{cells}{''.join(known)}")
    return "\n".join(lines)
