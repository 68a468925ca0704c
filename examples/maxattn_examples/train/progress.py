"""Progress of training: a bar or lines, scalars for TensorBoard, and profiles of some steps."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

import maxattn as ma
from maxattn.errors import ConfigError, escaped
from maxattn_examples.common import hosts

from .cost import Cost
from .settings import TrainingSettings

WINDOW = 50  # steps that loss and speed are averaged over


class Progress(AbstractContextManager["Progress"]):
    """Show steps, loss, tokens per second and, if the device's peak is known, the MFU.

    Args:
        first: number of steps before this run.
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
        """Count one more step, whose loss is the last of `losses`."""
        self._times.append(time.perf_counter())
        step, facts = len(losses), f"loss {recent(losses):.4f}  {self.cost.speed(self.seconds)}"
        self._bar.update(self._task, completed=step, facts=facts)
        if not self.console.is_terminal and (step % self.every == 0 or step == self.steps):
            left = "" if step == self.steps else self._time_left(step)
            print(f"step {step:>{len(str(self.steps))}}/{self.steps}  {facts}{left}", flush=True)

    def _time_left(self, step: int) -> str:
        """Return the time for the remaining steps at the recent speed, as text."""
        if self.seconds is None:
            return ""
        minutes, seconds = divmod(round((self.steps - step) * self.seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"  {hours}:{minutes:02}:{seconds:02} left"

    @property
    def seconds(self) -> float | None:
        """The mean seconds of recent steps; None before two steps."""
        if len(self._times) < 2:
            return None
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    def pause(self) -> None:
        """Forget the times, because something other than steps has run."""
        self._times.clear()


def recent(losses: list[float]) -> float:
    """Average the recent losses; a single loss depends mostly on its random times."""
    last = losses[-WINDOW:]
    return sum(last) / len(last)


class Board(AbstractContextManager["Board"]):
    """Write scalars for TensorBoard.

    Args:
        folder: None writes nothing; neither do processes other than the first.
        first: number of steps before this run; a killed run's scalars of later steps are hidden.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path | None, first: int) -> None:
        self._writer: Any = None
        if folder is None:
            return
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            rule = "it needs the package tensorboardX"
            remedy = "pip install tensorboardX, or training.tensorboard=false"
            raise ConfigError("training.tensorboard", "true", rule, remedy) from None
        if hosts.is_first():
            self._writer = SummaryWriter(str(folder), purge_step=first + 1, flush_secs=10)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, step: int, **scalars: float | None) -> None:
        """Write the scalars of a step, except those that are None."""
        if self._writer is None:
            return
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(f"training/{name}", value, step)


class Profiler:
    """Profile the steps that `enable_profiler` and related settings choose."""

    def __init__(self, settings: ma.AttentionConfig, folder: Path, first: int) -> None:
        self.folder = folder
        start = first + settings.skip_first_n_steps_for_profiler
        count = settings.profiler_steps if settings.enable_profiler else 0
        self.steps = range(start, start + count)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Profile this step if the settings choose it."""
        if step in self.steps[:1]:
            jax.profiler.start_trace(str(self.folder))
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step in self.steps[-1:]:
            jax.profiler.stop_trace()
            where = escaped(str(self.folder))
            print(f"profile of steps {self.steps[0]} to {self.steps[-1]} in {where}")
