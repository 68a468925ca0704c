"""The loop: one compiled step, called once for each time, with a progress bar.

A step is queued while the one before it runs, so that the device never waits for the host.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from maxattn.steps import Kept, Step, Steps, guided, step_needs
from maxattn_examples.common.compiled import Leaves, Structure, split
from maxattn_examples.samplers import Schedule, State, start, step
from maxattn_examples.samplers.schedule import Keys

from .check import options
from .not_finite import not_finite
from .task import Expert, SamplingTask


class Inputs(NamedTuple):
    """The inputs of a step beside parameters; a pytree.

    Args:
        i: number of the step.
        told: the model's conditions for each call: for both predictions at once, or without and
            then
            with the text. A prediction with the text uses the last.
        scale: of guidance.
        step: which computation to run.
        wanted: number of leading samples that decisions consider; None for all.
    """

    schedule: Schedule
    i: Array
    state: State
    told: tuple[Any, ...]
    scale: Array
    step: Step
    wanted: Array | None = None


Model = Callable[[Array, Array, Any], Array]  # a function of samples, times and conditions
Program = Callable[[Leaves, Inputs, Kept], tuple[State, Kept, Array]]
LINES = 10  # of a run without a terminal
NONE = "-"  # the letter of a step without a prediction


class Walk(AbstractContextManager["Walk"]):
    """Sample from noise, channels last, with one model after another.

    Models of the same structure share compiled steps, one for each kind of step.

    Args:
        task: how the models are called.
        told: arrays for each call of a step, from `rows.told_in_rows`.
        noise: standard normal.
        steps: what each step computes.
        console: for the progress bar; default standard output.
        keys: for each sample's new noise, if the sampler re-noises.
        mesh: the models' mesh.
        wanted: number of leading samples that are kept; the others pad the batch. None: all.

    Attributes:
        observe: called with the number and state after each step; the run continues from the state
            that it returns.
        kept: layer outputs that the last step saved for later ones.
    """

    def __init__(
        self,
        task: SamplingTask,
        told: tuple[dict[str, Array], ...],
        noise: Float[Array, "B ... C"],
        schedule: Schedule,
        steps: Steps,
        console: Console | None = None,
        keys: Keys | None = None,
        mesh: jax.sharding.Mesh | None = None,
        wanted: int | None = None,
    ) -> None:
        self.mesh = mesh
        self._wanted = None if wanted in (None, len(noise)) else jnp.int32(wanted)
        self.task, self.schedule, self.steps = task, schedule, steps
        self._structure: Structure | None = None
        self._once: Callable[..., Any]
        self._programs: dict[Any, Program] = {}
        self._console = console
        self.observe: Callable[[int, State], State] | None = None
        self.kept: Kept = {}
        self.begin(told, noise, keys)

    def begin(
        self,
        told: tuple[dict[str, Array], ...],
        noise: Float[Array, "B ... C"],
        keys: Keys | None = None,
    ) -> None:
        """Start a run whose arrays have the same shapes as before.

        Args:
            told: arrays for each call of a step.
            noise: standard normal.
            keys: for the noise that steps add, one per batch row.
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
        """Run an expert's steps with its model."""
        structure, parameters = split(model)
        if structure != self._structure:
            self._structure, self._programs = structure, {}
            self._once = jax.jit(lambda p, told: self.task.told(structure.merge(p), told))
        known = tuple(self._once(parameters, what) for what in self._told_to(expert))
        self.kept = {}
        queued: list[tuple[Array, Inputs]] = []
        wait = partial(self._wait, queued, partial(self.task.predict, structure.merge(parameters)))
        for i in range(self.bar.done, self.bar.done + expert.steps):
            own: Step = jax.tree.map(jnp.asarray, self.steps[i])
            kept = self.kept = step_needs(own, self.kept)
            told = known if own.guidance == "two" else known[-1:]
            scale, place = jnp.float32(expert.guidance_scale), jnp.int32(i)
            given = Inputs(self.schedule, place, self.state, told, scale, own, self._wanted)
            arrays, structure_of_given = jax.tree.flatten((own, kept))
            key = structure_of_given, tuple(x.sharding for x in arrays)
            if key not in self._programs:
                wait(0)
                self.bar.pause()
                self._programs[key] = _compiled(self.task, structure, (parameters, given, kept))
            self.bar.begin()
            self.state, self.kept, finite = self._programs[key](parameters, given, kept)
            decided = {k: x.computed for k, x in self.kept.items() if x.computed is not None}
            self._computed.append(decided)
            if self.observe is not None:
                self.state = self.observe(i, self.state)
            queued.append((finite, given))
            wait(1)
        wait(0)
        self.bar.pause()

    def outcome(self) -> Iterator[str]:
        """Report which steps computed, if steps decided that; call it after the last step."""
        for name, letters in self.decided().items():
            own = "" if name in ("both", "with") else f" of the prediction {name}"
            count = letters.count("X"), len(letters) - letters.count(NONE)
            yield "computed {} of {} steps{}: {}".format(*count, own, letters)

    def decided(self) -> dict[str, str]:
        """Return the letters of the steps, for each prediction in which steps decided."""
        computed = jax.device_get(self._computed)
        found = dict.fromkeys((name for each in computed for name in each), "")
        for own, made in zip(self.steps, computed, strict=True):
            for name in found:
                has = bool(own.predictions) if name == "both" else name in own.predictions
                letter = "X" if made.get(name, True) else "."
                found[name] += letter if name in made else own.letter if has else NONE
        return found

    def forwards(self) -> float:
        """Count the forwards of the steps so far, with their decisions."""
        found = 0.0
        for own, made in zip(self.steps, jax.device_get(self._computed), strict=True):
            decided = [x for x in own.predictions if not made.get(x, made.get("both", True))]
            found += own.forwards(self.task.layers, decided if made else None)
        return found

    def _told_to(self, expert: Expert) -> tuple[dict[str, Array], ...]:
        """Leave out the negative prompt if this one of two experts has no guidance."""
        if expert.guided or not self.task.settings.sampling.guided:
            return self.told
        samples, last = self.state.x.shape[0], self.told[-1]
        return ({name: x[-samples:] for name, x in last.items()},)

    def _wait(self, queued: list[tuple[Array, Inputs]], model: Model, most: int) -> None:
        """Wait until at most `most` steps are queued, and advance the bar by the others.

        Raises:
            InputError: a sample is not finite; it names the step and the layer.
        """
        while len(queued) > most:
            finite, given = queued.pop(0)
            if not finite:
                raise not_finite(model, given, len(self.steps))
            self.bar.advance()


def take(model: Model, given: Inputs, kept: Kept) -> tuple[State, Kept]:
    """Run one step; return the sampler's state, and the layer outputs saved for later steps."""
    after: list[Kept] = []
    told, rows = given.told, given.wanted

    def predict(x: Array, t: Array) -> Array:
        if not given.step.predictions:
            after.append({})
            return jnp.zeros_like(x)

        def call(name: str) -> Array:
            what = told[0] if name in ("without", "both") else told[-1]
            rows = jnp.concatenate([x, x]) if name == "both" else x
            return model(rows, jnp.broadcast_to(t, rows.shape[:1]), what)

        batched = len(told) == 1
        v, left = guided(given.step, kept, call, given.scale, batched=batched, rows=rows)
        after.append(left)
        return v

    state = step(given.schedule, given.i, given.state, predict)
    return state, after[0]


def _compiled(
    task: SamplingTask, structure: Structure, args: tuple[Leaves, Inputs, Kept]
) -> Program:
    """Compile a kind of step for these arguments, and print the compile time.

    The program also returns whether the sample is finite, and donates `kept`.
    """
    given, kept = (jax.tree.map(lambda x: x.sharding, each) for each in args[1:])

    def one(parameters: Leaves, given: Inputs, before: Kept) -> tuple[State, Kept, Array]:
        state, after = take(partial(task.predict, structure.merge(parameters)), given, before)
        if given.step.layers == "decide":
            after = _placed(after, kept)
        return state, after, jnp.isfinite(state.x).all()

    began = time.perf_counter()
    jitted = jax.jit(one, out_shardings=(given.state, None, None), donate_argnums=2)
    compiled = jitted.lower(*args).compile(options(task))
    print(f"compiled in {time.perf_counter() - began:.1f} s{_memory(compiled)}")
    return compiled


def _placed(kept: Kept, shardings: Any) -> Kept:
    """Give saved outputs the sharding of the inputs, so that the program is the same."""
    if not any(len(x.device_set) > 1 for x in jax.tree.leaves(shardings)):
        return kept

    def one(part: Any, where: Any) -> Any:
        return jax.tree.map(jax.lax.with_sharding_constraint, part, where)

    return {
        name: part._replace(
            sums=one(part.sums, shardings[name].sums),
            decision=one(part.decision, shardings[name].decision),
        )
        if name in shardings
        else part
        for name, part in kept.items()
    }


def _memory(compiled: Any) -> str:
    """Return the device memory of a step as text, if the compiler reports it."""
    found = compiled.memory_analysis()
    if found is None:
        return ""
    total = found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes
    return f"; a step holds {(total - found.alias_size_in_bytes) / 2**30:.2f} GiB on a device"


class Bar:
    """Show progress and speed: a bar on a terminal, else a few lines.

    Args:
        steps: number of steps of the run.
        console: default standard output.
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
        """The seconds of the steps so far, without compiling."""
        return self._spent

    @property
    def _live(self) -> bool:
        return self.console.is_terminal

    def begin(self) -> None:
        """Start the clock, or continue after a pause, which is not counted."""
        if self._began is None:
            self._bar.start()
            self._began = time.perf_counter() - self._spent

    def pause(self) -> None:
        """Stop the clock at the time of the last counted step."""
        self._began = None

    def stop(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.stop()

    def advance(self) -> None:
        """Count one more step."""
        self.done += 1
        assert self._began is not None, "begin comes first"
        self._spent = time.perf_counter() - self._began
        each = self._spent / self.done
        facts = f"{1 / each:.2f} steps/s" if each < 1 else f"{each:.2f} s a step"
        self._bar.update(self._task, completed=self.done, facts=facts)
        now_and_then = not self._live and self.done % max(1, self.steps // LINES) == 0
        if self.done == self.steps or now_and_then:
            print(f"step {self.done:>{len(str(self.steps))}}/{self.steps}  {facts}", flush=True)
