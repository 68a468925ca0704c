"""The loop: one compiled step, called once for each time, with a bar that says how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from samplers import Schedule, State, start, step
from samplers.guidance import guided

from .checks import options
from .task import SamplingTask

LINES = 10  # of a run without a terminal


def denoise(
    task: SamplingTask,
    model: nnx.Module,
    told: tuple[dict[str, Array], ...],
    noise: Float[Array, "B ... C"],
    schedule: Schedule,
    console: Console | None = None,
) -> Float[Array, "B ... C"]:
    """Walk from noise to latents, channels last.

    Args:
        task: how the model is called.
        model: with its weights.
        told: arrays for each call of a step, as `rows.told_in_rows` arranges them.
        noise: standard normal.
        schedule: of the sampler.
        console: where the bar is drawn; default standard output.
    """
    graph, parameters = nnx.split(model)

    def once(parameters: Any, told: Any) -> Any:
        return task.told(nnx.merge(graph, parameters), told)

    known = tuple(jax.jit(once)(parameters, what) for what in told)
    state = jax.jit(start)(schedule, noise)
    compiled = _compiled(task, graph, (parameters, schedule, jnp.int32(0), state, known))
    steps = len(schedule.times)
    with Bar(steps, console) as bar:
        for i in range(steps):
            state = compiled(parameters, schedule, jnp.int32(i), state, known)
            jax.block_until_ready(state)
            bar.advance()
    return state.x


def _compiled(task: SamplingTask, graph: Any, args: tuple[Any, ...]) -> Callable[..., State]:
    """Compile a step for these arguments, and print how long that took."""
    scale = task.settings.sampling.guidance_scale

    def one(parameters: Any, schedule: Schedule, i: Array, state: State, known: Any) -> State:
        model = nnx.merge(graph, parameters)
        predict = guided(lambda x, t, what: task.predict(model, x, t, what), known, scale)
        return step(schedule, i, state, predict)

    shardings = jax.tree.map(lambda x: x.sharding, args[3])
    began = time.perf_counter()
    jitted = jax.jit(one, donate_argnums=3, out_shardings=shardings)
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


class Bar(AbstractContextManager["Bar"]):
    """Show steps and their speed: a bar on a terminal, else a few lines.

    Args:
        steps: of the run.
        console: where to; default standard output.
    """

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.steps, self.done, self.console = steps, 0, console or Console()
        facts = TextColumn("{task.fields[facts]}")
        columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), facts)
        more: dict[str, Any] = {"console": self.console, "disable": not self._live}
        self._bar = Progress(*columns, TimeRemainingColumn(), **more)
        self._task = self._bar.add_task("", total=steps, facts="")

    @property
    def _live(self) -> bool:
        return self.console.is_terminal

    def __enter__(self) -> Self:
        self._bar.start()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """Count one step more."""
        self.done += 1
        each = (time.perf_counter() - self._began) / self.done
        facts = f"{1 / each:.2f} steps/s" if each < 1 else f"{each:.2f} s a step"
        self._bar.update(self._task, completed=self.done, facts=facts)
        now_and_then = not self._live and self.done % max(1, self.steps // LINES) == 0
        if self.done == self.steps or now_and_then:
            print(f"step {self.done:>{len(str(self.steps))}}/{self.steps}  {facts}", flush=True)
