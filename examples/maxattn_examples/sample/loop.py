"""The loop: one compiled step, called once for each time, with a bar that says how fast.

A step is queued while the one before it runs, so that the device never waits for the host.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from maxattn_examples.common.split import Leaves, Structure, split
from maxattn_examples.fast.deciding import EASYCACHE
from maxattn_examples.fast.program import Inputs, Made, Memory, take
from maxattn_examples.fast.steps import Planned, Step, decided_letters, decided_lines
from maxattn_examples.samplers import Schedule, State, start
from maxattn_examples.samplers.schedule import Keys

from .checks import options
from .kernels import structure_with
from .not_finite import not_finite
from .planned import guidance_of
from .task import Expert, SamplingTask

Program = Callable[[Leaves, Inputs], tuple[State, Made, Array]]
LINES = 10  # of a run without a terminal


class Walk(AbstractContextManager["Walk"]):
    """Walk from noise to a sample, channels last, with one model after the other.

    Models of the same structure share compiled steps, one for each kind of step.

    Args:
        task: how the models are called.
        told: arrays for each call of a step, as `rows.told_in_rows` arranges them.
        noise: standard normal.
        schedule: of the sampler.
        planned: what each step computes.
        console: where the bar is drawn; default standard output.
        keys: of the new noise of each sample, for a sampler that re-noises.
        mesh: that the models are on.
        wanted: samples, the first ones; the others fill up the devices. None: all.

    Attributes:
        observe: is given the number and the state of each step that was taken; the run goes on from
            what it returns.
        memory: what the last step kept.
    """

    def __init__(
        self,
        task: SamplingTask,
        told: tuple[dict[str, Array], ...],
        noise: Float[Array, "B ... C"],
        schedule: Schedule,
        planned: Sequence[Planned],
        console: Console | None = None,
        keys: Keys | None = None,
        mesh: jax.sharding.Mesh | None = None,
        wanted: int | None = None,
    ) -> None:
        self.mesh = mesh
        self._wanted = None if wanted in (None, len(noise)) else jnp.int32(wanted)
        self.task, self.schedule, self.planned = task, schedule, planned
        self._structure: Structure | None = None
        self._once: Callable[..., Any]
        self._programs: dict[Any, Program] = {}
        self._with: dict[str | None, Structure] = {}
        self._console = console
        self.observe: Callable[[int, State], State] | None = None
        self.memory = Memory()
        self.begin(told, noise, keys)

    def begin(
        self,
        told: tuple[dict[str, Array], ...],
        noise: Float[Array, "B ... C"],
        keys: Keys | None = None,
    ) -> None:
        """Go to the first step, with rows of the shapes that were given before.

        Args:
            told: arrays for each call of a step.
            noise: standard normal.
            keys: of the noise that steps add, one for each row.
        """
        self.told, self.given = told, (told, noise, keys)
        self.state: State = jax.jit(start)(self.schedule, noise, keys)
        self.bar = Bar(len(self.schedule.times), self._console)
        self._computed: list[Mapping[str, Array]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.stop()

    def take(self, model: nnx.Module, expert: Expert) -> None:
        """Take an expert's steps with its model."""
        structure, parameters = split(model)
        if structure != self._structure:
            self._structure, self._programs, self._with = structure, {}, {}
            self._once = jax.jit(lambda p, told: self.task.told(structure.merge(p), told))
        known = tuple(self._once(parameters, what) for what in self._told_to(expert))
        memory = self.memory = Memory.of(self.planned)
        queued: list[tuple[Array, Step, Inputs]] = []
        wait = partial(self._wait, queued, structure, parameters)
        for i in range(self.bar.done, self.bar.done + expert.steps):
            step, kept = self.planned[i].step, memory.before(self.planned[i])
            told = known if step.guidance == "guided" else known[-1:]
            scale = jnp.float32(expert.guidance_scale)
            place = jnp.int32(i)
            given = Inputs(self.schedule, place, self.state, told, scale, kept, self._wanted)
            arrays, structure_of_kept = jax.tree.flatten(kept)
            key = step, structure_of_kept, tuple(x.sharding for x in arrays)
            if key not in self._programs:
                wait(0)
                self.bar.pause()
                own = self._structure_of(step.kernel, structure)
                self._programs[key] = _compiled(self.task, own, step, (parameters, given))
            self.bar.begin()
            self.state, made, finite = self._programs[key](parameters, given)
            memory.after(made)
            self._computed.append(made.computed)
            if self.observe is not None:
                self.state = self.observe(i, self.state)
            # A check of the layers does not take what was kept, which is freed now.
            bare = given._replace(kept=kept._replace(weights=(), added=()))
            queued.append((finite, step, bare))
            wait(1)
        wait(0)
        self.bar.pause()

    def outcome(self) -> Iterator[str]:
        """Say which steps computed, if they decided that; call it after the last one."""
        return decided_lines(self.planned, jax.device_get(self._computed))

    def decided(self) -> list[str]:
        """Return the steps' letters, as `outcome` says them, of each call that decided some."""
        computed = jax.device_get(self._computed)
        return list(decided_letters(self.planned, computed).values())

    def forwards(self) -> float:
        """Count the forwards of the steps that were taken, as they decided."""
        found = 0.0
        for each, made in zip(self.planned, jax.device_get(self._computed), strict=True):
            every = made.get("both", made.get(EASYCACHE, True))
            reused = [x for x in each.step.predictions if not made.get(x, every)]
            found += each.step.forwards(self.task.layers, reused)
        return found

    def _structure_of(self, kernel: str | None, model: Structure) -> Structure:
        """Return the structure that takes the model's arrays, with a kernel."""
        if kernel not in self._with:
            self._with[kernel] = structure_with(self.task, kernel, model, self.mesh)
        return self._with[kernel]

    def _told_to(self, expert: Expert) -> tuple[dict[str, Array], ...]:
        """Leave out the negative prompt for the one of two experts that has no guidance."""
        if expert.guided or not self.task.settings.sampling.guided:
            return self.told
        samples, last = self.state.x.shape[0], self.told[-1]
        return ({name: x[-samples:] for name, x in last.items()},)

    def _wait(
        self,
        queued: list[tuple[Array, Step, Inputs]],
        structure: Structure,
        parameters: Leaves,
        most: int,
    ) -> None:
        """Wait until at most so many steps are queued, and count the others.

        Raises:
            InputError: a sample is not finite, at this step and layer.
        """
        while len(queued) > most:
            finite, step, given = queued.pop(0)
            if not finite:
                own = self._structure_of(step.kernel, structure)
                model = partial(self.task.predict, own.merge(parameters))
                how = guidance_of(self.task)
                raise not_finite(model, step, how, given, len(self.planned))
            self.bar.advance()


def _compiled(
    task: SamplingTask, structure: Structure, step: Step, args: tuple[Leaves, Inputs]
) -> Program:
    """Compile a kind of step for these arguments, and print how long that took.

    Its last result is whether the sample is finite.
    """
    how = guidance_of(task)
    shardings = jax.tree.map(lambda x: x.sharding, args[1])

    def one(parameters: Leaves, given: Inputs) -> tuple[State, Made, Array]:
        model = partial(task.predict, structure.merge(parameters))
        state, made = take(model, step, how, given)
        if step.layers == "decide":
            made = made._replace(added=_placed(made.added, shardings.kept.added[0]))
        return state, made, jnp.isfinite(state.x).all()

    began = time.perf_counter()
    jitted = jax.jit(one, out_shardings=(shardings.state, None, None))
    compiled = jitted.lower(*args).compile(options(task))
    print(f"compiled in {time.perf_counter() - began:.1f} s{_memory(compiled)}")
    return compiled


def _placed(added: Mapping[str, Any], shardings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Place what a step keeps as what it takes, so that the next step runs the same program."""

    def one(name: str, part: Any) -> Any:
        where = shardings.get(name)
        if where is None or jax.tree.structure(part) != jax.tree.structure(where):
            return part
        return jax.lax.with_sharding_constraint(part, where)

    on_many = any(len(x.device_set) > 1 for x in jax.tree.leaves(shardings))
    return {name: one(name, part) for name, part in added.items()} if on_many else added


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
        self._began: float | None = None
        facts = TextColumn("{task.fields[facts]}")
        columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), facts)
        more: dict[str, Any] = {"console": self.console, "disable": not self._live}
        self._bar = Progress(*columns, TimeRemainingColumn(), **more)
        self._task = self._bar.add_task("", total=steps, facts="")

    @property
    def seconds(self) -> float:
        """How long the steps so far took, without compiling."""
        return self._spent

    @property
    def _live(self) -> bool:
        return self.console.is_terminal

    def begin(self) -> None:
        """Start the clock, or go on after a pause that does not count."""
        if self._began is None:
            self._bar.start()
            self._began = time.perf_counter() - self._spent

    def pause(self) -> None:
        """Stop the clock at the last step that was counted."""
        self._began = None

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()

    def advance(self) -> None:
        """Count one step more."""
        self.done += 1
        assert self._began is not None, "begin comes first"
        self._spent = time.perf_counter() - self._began
        each = self._spent / self.done
        facts = f"{1 / each:.2f} steps/s" if each < 1 else f"{each:.2f} s a step"
        self._bar.update(self._task, completed=self.done, facts=facts)
        now_and_then = not self._live and self.done % max(1, self.steps // LINES) == 0
        if self.done == self.steps or now_and_then:
            print(f"step {self.done:>{len(str(self.steps))}}/{self.steps}  {facts}", flush=True)
