"""Says how training goes: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .cost import Cost
from .settings import TrainingSettings

WINDOW = 50  # steps that loss and speed are averaged over


class Progress(AbstractContextManager["Progress"]):
    """Show steps, loss, tokens a second and, where the device's peak is known, the MFU.

    Args:
        training: how many steps, and how often a line is printed.
        cost: of a step.
        first: steps taken before this run.
        console: where to; default standard output.
    """

    def __init__(
        self, training: TrainingSettings, cost: Cost, first: int, console: Console | None = None
    ) -> None:
        self.steps, self.every, self.cost = training.steps, training.log_every, cost
        self.console = console or Console(file=getattr(sys.stdout, "stream", None))
        self._times: deque[float] = deque(maxlen=WINDOW + 1)
        facts = TextColumn("{task.fields[facts]}")
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), facts)
        more: dict[str, Any] = {"console": self.console, "disable": not self.console.is_terminal}
        self._bar = Bar(*columns, TimeRemainingColumn(), **more)
        self._task = self._bar.add_task("", total=self.steps, completed=first, facts="compiling")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, losses: list[float]) -> None:
        """Count one step more, the last one of `losses`."""
        self._times.append(time.perf_counter())
        step, facts = len(losses), f"loss {recent(losses):.4f}  {self.cost.speed(self.seconds)}"
        self._bar.update(self._task, completed=step, facts=facts)
        if not self.console.is_terminal and (step % self.every == 0 or step == self.steps):
            left = "" if step == self.steps else self._time_left(step)
            print(f"step {step:>{len(str(self.steps))}}/{self.steps}  {facts}{left}", flush=True)

    def _time_left(self, step: int) -> str:
        """Return how long the other steps take at the speed of the last ones."""
        if self.seconds is None:
            return ""
        minutes, seconds = divmod(round((self.steps - step) * self.seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"  {hours}:{minutes:02}:{seconds:02} left"

    @property
    def seconds(self) -> float | None:
        """How long a step took, on average over the last ones; None before two have been taken."""
        if len(self._times) < 2:
            return None
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    def pause(self) -> None:
        """Forget the times: something else than steps has been going on."""
        self._times.clear()


def recent(losses: list[float]) -> float:
    """Average the last losses: one alone is mostly the luck of its times."""
    last = losses[-WINDOW:]
    return sum(last) / len(last)
