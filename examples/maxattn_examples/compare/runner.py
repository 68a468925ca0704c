"""One way of sampling: its samples, and how far single steps are from those of the dense run.

From the same noise two runs drift apart for two reasons: a step computes something else, and what
earlier steps changed grows. Both are measured. With x the dense run's samples, x' those of another,

    drift                  |x'_n - x_n| / |x_n|                          at the end
    error of a step        |x'_(i+1) - x_(i+1)| / |x_(i+1) - x_i|        from the dense run's x_i

where the second run keeps what its own layers added before, and goes on from the dense samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from maxattn import sharding
from maxattn.steps import Step
from maxattn_examples.sample.files import Paths
from maxattn_examples.sample.rows import place
from maxattn_examples.sample.run import Start, run_of, walk_of
from maxattn_examples.sample.task import Arrays, SamplingTask
from maxattn_examples.sample.weights import load
from maxattn_examples.samplers import Schedule, State

Samples = Float[np.ndarray, "B ..."]


@dataclass
class Trajectory:
    """The states of a dense run, on the host.

    Args:
        sampler: its name.
        schedule: of its steps.
        wanted: rows that are not there to fill up devices.
        states: before the first step, and after each.
    """

    sampler: str
    schedule: Schedule
    wanted: int
    states: list[State] = field(default_factory=list)

    def at(self, i: int) -> Samples:
        """Return the samples after step i; -1 is before the first one."""
        return np.asarray(self.states[i + 1].x)[: self.wanted]


@dataclass
class Run:
    """What one way of sampling gave.

    Args:
        latents: at the end, channels last.
        seconds: of the steps, without compiling.
        forwards: that were computed, counted in layers where some were not.
    """

    latents: Samples
    seconds: float
    forwards: float


class Runner:
    """Runs one way of sampling, with its weights on the devices.

    Args:
        task: of the way.
        paths: of the weights.
        start: what the models are told, and noise.
        mesh: devices; default the one there is.
    """

    @sharding.inside_auto_axes()
    def __init__(
        self, task: SamplingTask, paths: Paths, start: Start, mesh: jax.sharding.Mesh | None
    ) -> None:
        self.task, self.paths, self.start = task, paths, start
        self.mesh = sharding.program_mesh(mesh)
        self.resolved = run_of(task, paths, start.rows)
        self.walk = walk_of(task, paths, start, self.resolved, self.mesh)
        self._begin = partial(self.walk.begin, *self.walk.given)
        self._models: dict[str, Any] = {}

    def give(self, told: tuple[Arrays, ...], noise: Samples, keys: np.ndarray) -> None:
        """Give other rows of the same shapes: what they are told, their noise, and keys of more."""
        parts = tuple({name: place(x, self.mesh) for name, x in part.items()} for part in told)
        fresh = place(keys, self.mesh) if self.resolved.sampler.renoises else None
        self._begin = partial(self.walk.begin, parts, place(noise, self.mesh), fresh)

    def run(self) -> Run:
        """Draw."""
        return self.taken()

    def dense(self) -> tuple[Run, Trajectory]:
        """Draw, and keep the state after every step."""
        self._begin()
        name, wanted = self.resolved.sampler.name, self.start.rows.wanted
        kept = Trajectory(name, self.walk.schedule, wanted, [jax.device_get(self.walk.state)])

        def observe(i: int, state: State) -> State:
            kept.states.append(jax.device_get(state))
            return state

        return self.taken(observe), kept

    def unlike(self, dense: Trajectory) -> str | None:
        """Return why no step can begin from the dense run's samples; None if all can."""
        name, ours, theirs = self.resolved.sampler.name, self.walk.schedule, dense.schedule
        if name != dense.sampler:
            return f"the sampler is {name}, and the dense run has {dense.sampler}"
        if (steps := len(ours.times)) != (of_dense := len(theirs.times)):
            return f"the run has {steps} steps, and the dense one {of_dense}"
        alike = jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
        return None if alike else "the times of the steps are not those of the dense run"

    def errors(self, dense: Trajectory) -> list[Float[np.ndarray, " B"]]:
        """Take every step from the dense run's samples; return how far each ends from theirs."""
        found: list[Float[np.ndarray, " B"]] = []
        wanted = dense.wanted

        def observe(i: int, state: State) -> State:
            before, after, ours = dense.at(i - 1), dense.at(i), np.asarray(state.x)[:wanted]
            found.append(_norm(ours - after) / np.maximum(_norm(after - before), 1e-30))
            return _placed(dense.states[i + 1], state, wanted)

        self.taken(observe)
        return found

    def approximate(self) -> list[int]:
        """Return the steps of the last run that reuse or approximate; all if none does so."""
        decided, steps = self.walk.decided().values(), self.resolved.steps

        def is_so(i: int, step: Step) -> bool:
            usual = Step(guidance="two" if steps.guided[i] else "one", keeps=step.keeps)
            plain = replace(step, number=0, span=None, blocks=0, most=1) != usual
            reuses = any(letters[i] == "." for letters in decided)
            return reuses or (plain and step.layers != "decide")

        found = [i for i, step in enumerate(steps) if is_so(i, step)]
        return found or list(range(len(steps)))

    @sharding.inside_auto_axes()
    def taken(self, observe: Any = None) -> Run:
        """Draw; `observe` is given each step, as of `Walk`."""
        self._begin()
        self.walk.observe = observe
        with self.walk as walk:
            for expert in (e for e in self.resolved.experts if e.steps):
                if expert.part not in self._models:
                    self._models.clear()  # a device may have room for one
                    model = load(self.task, self.paths, self.mesh, expert.part)
                    self._models[expert.part] = model
                walk.take(self._models[expert.part], expert)
        last = self.task.finished(walk.state.x, walk.told[-1])
        latents = np.asarray(last)[: self.start.rows.wanted]
        return Run(latents, walk.bar.seconds, walk.forwards())


def psnr(x: Samples, of: Samples) -> Float[np.ndarray, " B"]:
    """Return the peak signal-to-noise ratio in dB, the peak being the range of the dense sample."""
    inner = tuple(range(1, x.ndim))
    error = np.square(x.astype(np.float64) - of).mean(axis=inner)
    peak = of.max(axis=inner) - of.min(axis=inner)
    return 10 * np.log10(np.maximum(peak, 1e-30) ** 2 / np.maximum(error, 1e-30))


def _norm(x: Samples) -> Float[np.ndarray, " B"]:
    return np.sqrt(np.square(x.astype(np.float64)).sum(axis=tuple(range(1, x.ndim))))


def _placed(state: State, like: State, wanted: int) -> State:
    """Place a dense run's rows as another run has its own, which may fill up more devices."""

    def one(x: Any, other: jax.Array) -> jax.Array:
        rows = np.resize(np.arange(wanted), len(other))
        return jax.device_put(x[rows], other.sharding)

    return jax.tree.map(one, state, like)
