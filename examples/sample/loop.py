"""The loop: one compiled step, called once for each time, with a bar that says how fast.

A step is queued while the one before it runs, so that the device never waits for the host.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import jax
import jax.numpy as jnp
from common.split import Leaves, Structure, split
from flax import nnx
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from samplers import Schedule, State, start, step
from samplers.guidance import guided

from .checks import options
from .task import Expert, SamplingTask

LINES = 10  # of a run without a terminal


class Walk(AbstractContextManager["Walk"]):
    """Walk from noise to a sample, channels last, with one model after the other.

    Models of the same structure share one compiled step.

    Args:
        task: how the models are called.
        told: arrays for each call of a step, as `rows.told_in_rows` arranges them.
        noise: standard normal.
        schedule: of the sampler.
        console: where the bar is drawn; default standard output.
    """

    def __init__(
        self,
        task: SamplingTask,
        told: tuple[dict[str, Array], ...],
        noise: Float[Array, "B ... C"],
        schedule: Schedule,
        console: Console | None = None,
    ) -> None:
        self.task, self.told, self.schedule = task, told, schedule
        self.state: State = jax.jit(start)(schedule, noise)
        self.bar = Bar(len(schedule.times), console)
        self._structure: Structure | None = None
        self._once: Callable[..., Any]
        self._step: Callable[..., tuple[State, Array]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.stop()

    def take(self, model: nnx.Module, expert: Expert) -> None:
        """Take an expert's steps with its model."""
        structure, parameters = split(model)
        if structure != self._structure:
            self._structure, self._step = structure, None
            self._once = jax.jit(lambda p, told: self.task.told(structure.merge(p), told))
        known, scale = (
            tuple(self._once(parameters, what) for what in self.told),
            jnp.float32(expert.guidance_scale),
        )
        if self._step is None:
            first = parameters, self.schedule, jnp.int32(0), self.state, known, scale
            self._step = _compiled(self.task, structure, first)
        self.bar.begin()
        queued: list[Array] = []
        for i in range(self.bar.done, self.bar.done + expert.steps):
            given = parameters, self.schedule, jnp.int32(i), self.state, known, scale
            self.state, done = self._step(*given)
            queued.append(done)
            if len(queued) > 1:
                self._wait(queued.pop(0))
        for done in queued:
            self._wait(done)

    def _wait(self, done: Array) -> None:
        """Wait for a step, and count it."""
        jax.block_until_ready(done)
        self.bar.advance()


def _compiled(
    task: SamplingTask, structure: Structure, args: tuple[Any, ...]
) -> Callable[..., tuple[State, Array]]:
    """Compile a step for these arguments, and print how long that took.

    Its second result is what to wait for: the state is given up to the step after it.
    """
    guides = task.settings.sampling.cfg_scale != 1

    def one(
        parameters: Leaves, schedule: Schedule, i: Array, state: State, known: Any, scale: Array
    ) -> tuple[State, Array]:
        model = structure.merge(parameters)
        call = lambda x, t, what: task.predict(model, x, t, what)  # noqa: E731
        state = step(schedule, i, state, guided(call, known, scale if guides else 1))
        return state, i + 1  # i itself jax would hand back before the step has run

    shardings = jax.tree.map(lambda x: x.sharding, args[3])
    began = time.perf_counter()
    jitted = jax.jit(one, donate_argnums=3, out_shardings=(shardings, None))
    compiled = jitted.lower(*args).compile(options(task))
    print(f"compiled in {time.perf_counter() - began:.1f} s{_memory(compiled)}")
    return compiled


def _memory(compiled: Any) -> str:
    """Say what a device holds while a step runs, where the compiler knows."""
    found = compiled.memory_analysis()
    if found is None:
        return ""
    total = found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes
    return f"; a step holds {(total - found.alias_size_in_bytes) / 2**30:.2f} GiB on a device"


class Bar:
    """Show steps and their speed: a bar on a terminal, else a few lines.

    Args:
        steps: of the run.
        console: where to; default standard output.
    """

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.steps, self.done = steps, 0
        self.console = console or Console(file=getattr(sys.stdout, "stream", None))
        self._spent = 0.0
        facts = TextColumn("{task.fields[facts]}")
        columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), facts)
        more: dict[str, Any] = {"console": self.console, "disable": not self._live}
        self._bar = Progress(*columns, TimeRemainingColumn(), **more)
        self._task = self._bar.add_task("", total=steps, facts="")

    @property
    def _live(self) -> bool:
        return self.console.is_terminal

    def begin(self) -> None:
        """Start the clock, or go on after a pause that does not count."""
        self._bar.start()
        self._began = time.perf_counter() - self._spent

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()

    def advance(self) -> None:
        """Count one step more."""
        self.done += 1
        self._spent = time.perf_counter() - self._began
        each = self._spent / self.done
        facts = f"{1 / each:.2f} steps/s" if each < 1 else f"{each:.2f} s a step"
        self._bar.update(self._task, completed=self.done, facts=facts)
        now_and_then = not self._live and self.done % max(1, self.steps // LINES) == 0
        if self.done == self.steps or now_and_then:
            print(f"step {self.done:>{len(str(self.steps))}}/{self.steps}  {facts}", flush=True)
