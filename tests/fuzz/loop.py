"""Draws cases until the time is up; a worker process runs them, and another takes its place."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from tests.fuzz.case import Outcome
from tests.fuzz.categories import CATEGORIES

CASES = 150  # that one worker runs: programs it compiled stay in its memory
LATEST = 240.0  # seconds without an answer after which a worker is taken to hang


def fuzz(names: Sequence[str], seed: int, seconds: float, count: int | None) -> Iterator[Outcome]:
    """Run cases one after the other, and print each failure as a snippet."""
    until, worker = time.monotonic() + seconds, Worker()
    try:
        for number, case in enumerate(_order(names, seed)):
            if (number >= count) if count is not None else (time.monotonic() > until):
                break
            worker = worker.fresh(CASES)
            outcome = worker.run(case)
            if outcome.kind == "failed":
                print(f"\n{outcome.snippet or outcome}", flush=True)
            yield outcome
    finally:
        worker.end()


def _order(names: Sequence[str], seed: int) -> Iterator[str]:
    """Name cases for ever: always of the category that has had the fewest for its weight."""
    drawn = dict.fromkeys(names, 0)
    while True:
        name = min(names, key=lambda name: (drawn[name] + 0.5) / CATEGORIES[name].weight)
        yield f"{name}:{seed * 1_000_000 + drawn[name]}"
        drawn[name] += 1


class Worker:
    """A process that runs cases as it is told their names."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.worker"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )
        self.cases, self.is_gone = 0, False

    def fresh(self, most: int) -> Worker:
        """Return this worker, or another where it is gone or has run its cases."""
        if not self.is_gone and self.cases < most:
            return self
        self.end()
        return Worker()

    def run(self, name: str) -> Outcome:
        """Run one case; a worker that hangs or dies is a failure of the case."""
        assert self._process.stdin and self._process.stdout
        self.cases += 1
        self._process.stdin.write(f"{name}\n".encode())
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], LATEST)
        line = self._process.stdout.readline() if ready else b""
        return Outcome(*json.loads(line)) if line else self._lost(name, bool(ready))

    def _lost(self, name: str, died: bool) -> Outcome:
        self.is_gone = True
        what = "the process died" if died else f"no answer in {LATEST:g} s"
        return Outcome(name, "failed", what, f"# {what}: make fuzz CASE={name}\n", "", LATEST)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with open(os.devnull):
                    stream.close()
