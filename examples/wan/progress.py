"""Says how training goes: a bar where there is a terminal, a line now and then where there is none."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .settings import Settings

WINDOW = 50  # steps that loss and speed are averaged over


class Progress(AbstractContextManager["Progress"]):
    """Show steps, loss and tokens a second.

    Args:
        settings: how many steps of how many tokens.
        first: steps taken before this run.
        console: where to; default standard output.
    """

    def __init__(self, settings: Settings, first: int, console: Console | None = None) -> None:
        self.steps, self.every = settings.training.steps, settings.training.log_every
        self.tokens = settings.training.batch_size * math.prod(settings.grid)
        self.console = console or Console()
        self._times: deque[float] = deque(maxlen=WINDOW + 1)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
        self._bar = Bar(*columns, TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("", total=self.steps, completed=first, facts="compiling")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, losses: list[float]) -> None:
        """Count one step more, the last one of `losses`."""
        self._times.append(time.perf_counter())
        step, facts = len(losses), f"loss {recent(losses):.4f}  {self._speed():,.0f} tokens/s"
        self._bar.update(self._task, completed=step, facts=facts)
        if not self.console.is_terminal and (step % self.every == 0 or step == self.steps):
            print(f"step {step:>{len(str(self.steps))}}/{self.steps}  {facts}", flush=True)

    def _speed(self) -> float:
        if len(self._times) < 2:
            return 0.0
        return self.tokens * (len(self._times) - 1) / (self._times[-1] - self._times[0])


def recent(losses: list[float]) -> float:
    """Average the last losses: one alone is mostly the luck of its times."""
    last = losses[-WINDOW:]
    return sum(last) / len(last)
