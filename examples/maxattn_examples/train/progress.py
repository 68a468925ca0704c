"""Progress of training: a bar or lines, TensorBoard, profiles, operations and MFU."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

import maxattn as ma
from maxattn.devices import peak_flops
from maxattn.errors import ConfigError, escaped
from maxattn_examples.common import hosts

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

    def __exit__(self, *error: object) -> None:
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

    def __exit__(self, *error: object) -> None:
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


# ---- the cost of a step --------------------------------------------------------------------------
#
#     MFU = operations of the model / (seconds x devices x peak)
#
# `count` counts the operations of the forward; the backward has twice as many for matmuls (as many
# if LoRA freezes the weights), two and a half times for attention. Recomputation is not counted.
# The peak is the published one for dense bfloat16 matmuls.


@dataclass(frozen=True)
class Cost:
    """The cost of one step over all devices.

    Args:
        tokens: of the batch.
        flops: floating-point operations; 0 if they are not counted.
        peak: operations per second of all devices together; None if unknown.
    """

    tokens: int
    flops: float = 0.0
    peak: float | None = None

    def mfu(self, seconds: float) -> float | None:
        """Return the share of the peak that a step of `seconds` uses."""
        return self.flops / (seconds * self.peak) if self.peak and self.flops else None

    def speed(self, seconds: float | None) -> str:
        """Return tokens per second, and the MFU if it is known."""
        if seconds is None:
            return "0 tokens/s"
        share, speed = self.mfu(seconds), f"{self.tokens / seconds:,.0f} tokens/s"
        return speed if share is None else f"{speed}  MFU {share:.1%}"


def cost_of(
    training: TrainingSettings,
    tokens: int,
    mesh: jax.sharding.Mesh | None,
    forward: Callable[..., Any],
    *args: Any,
) -> Cost:
    """Count the cost of a training step on the devices of a mesh.

    Args:
        forward: the loss of a part of a batch.
    """
    of_one = peak_flops(ma.Target.here().device_kind)
    devices = 1 if mesh is None else mesh.size
    tokens = training.batch_size * tokens
    if of_one is None:  # nothing to compare with, so nothing is counted
        return Cost(tokens)
    work = count(forward, *args)
    products = 1.0 if training.lora_rank else BACKWARD["matmul"]
    each = work.matmul * (1.0 + products) + work.attention * (1.0 + BACKWARD["attention"])
    return Cost(tokens, training.gradient_accumulation_steps * each, of_one * devices)


BACKWARD = {"attention": 2.5, "matmul": 2.0}  # of the forward


@dataclass(frozen=True)
class Work:
    """The operations of one forward pass."""

    attention: int = 0
    matmul: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.attention + other.attention, self.matmul + other.matmul)

    def total(self, training: bool, frozen: bool = False) -> float:
        """Sum both, with the backward.

        Args:
            training: whether a backward follows.
            frozen: whether the weights of matmuls are frozen, so that their backward is one matmul
                each.
        """
        factors = BACKWARD | ({"matmul": 1.0} if frozen else {})
        more = {kind: 1.0 + (factor if training else 0.0) for kind, factor in factors.items()}
        return self.attention * more["attention"] + self.matmul * more["matmul"]


def count(f: Callable[..., Any], *shapes: Any) -> Work:
    """Count the operations of a function from the shapes of its arrays."""
    return _of(jax.make_jaxpr(f)(*shapes).jaxpr)


def _of(jaxpr: Any) -> Work:
    return sum((_equation(eqn) for eqn in jaxpr.eqns), Work())


def _equation(eqn: Any) -> Work:
    name = eqn.primitive.name
    if eqn.params.get("name") == "_run" and [v.aval.ndim for v in eqn.invars[:3]] == [4, 4, 4]:
        # maxattn's own jit around every attention: q [B, T, N, H], k [B, S, K, H], v [B, S, K, V].
        (b, t, n, h), (_, s, _, v) = (eqn.invars[i].aval.shape for i in (0, 2))
        return Work(attention=2 * b * n * t * s * (h + v))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        length = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        return Work(matmul=2 * eqn.outvars[0].aval.size * length)
    if name == "conv_general_dilated":
        out = eqn.outvars[0].aval
        channels = out.shape[eqn.params["dimension_numbers"].out_spec[1]]
        return Work(matmul=2 * out.size * (eqn.invars[1].aval.size // channels))
    times = eqn.params["length"] if name == "scan" else 1
    inner = sum((_of(each) for value in eqn.params.values() for each in _jaxprs(value)), Work())
    return Work(times * inner.attention, times * inner.matmul)


def _jaxprs(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [found for each in value for found in _jaxprs(each)]
    inner = getattr(value, "jaxpr", value)
    return [inner] if hasattr(inner, "eqns") else []
