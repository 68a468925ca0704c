"""Run one way of sampling, and measure how far its single steps are from the dense run's.

Two runs from the same noise drift apart because single steps compute something else, and because
the differences of earlier steps grow. Both are measured. With x of the dense run, x' of another,

    drift            |x'_n - x_n| / |x_n|                          at the end
    error of a step  |x'_(i+1) - x_(i+1)| / |x_(i+1) - x_i|        from the dense run's x_i

where the second run reuses what its own layers added, but continues from the dense run's samples.
The dense run's states are kept on the host for the first batch of clips only, so the error of
steps is measured on that batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt32

from maxattn import sharding
from maxattn.steps import Step
from maxattn_examples.sample.inputs import Paths, Rows, batch_ways, place, told_in_rows
from maxattn_examples.sample.loop import Walk
from maxattn_examples.sample.resolve import predicts_both, run_facts
from maxattn_examples.sample.run import arrays_of, noise_of, run_of
from maxattn_examples.sample.task import Arrays, SamplingTask
from maxattn_examples.sample.weights import load
from maxattn_examples.samplers import Schedule, State, keys_of

from .report import DENSE, Report, Row, Samples, Score
from .ways import PLAIN, Ways

AddScores = Callable[[SamplingTask, str, Samples], Mapping[str, Score]]
Observe = Callable[[int, State], State]


@dataclass(frozen=True)
class Clips:
    """The inputs of every way of sampling: one row per clip, in batches of equal size."""

    arrays: Arrays  # the model's conditions, such as text
    noise: Samples  # channels last
    keys: UInt32[np.ndarray, "n 2"]  # for the noise that samplers add
    batch: int

    @classmethod
    def of_prompts(cls, task: SamplingTask, paths: Paths, batch: int | None = None) -> Clips:
        """Read or encode the prompts of settings and files; by default in one batch."""
        arrays, sampling = arrays_of(task, paths), task.settings.sampling
        rows = Rows(max(map(len, arrays.values())), sampling.per_prompt, 1, 1)
        noise = np.moveaxis(noise_of(paths, rows, task), 1, -1)
        arrays = {name: rows.spread(array) for name, array in arrays.items()}
        return cls(arrays, noise, keys_of(sampling.seed, len(noise)), batch or len(noise))


class Trajectory(NamedTuple):
    """The states of the dense run of one batch, on the host."""

    sampler: str
    schedule: Schedule
    noise: Samples  # before the first step
    states: list[State]  # after each step


class Run(NamedTuple):
    """The result of one way of sampling."""

    latents: Samples  # final, channels last
    seconds: float  # without compiling
    forwards: float  # mean over the batches


def rows_of(task: SamplingTask, batch: int, mesh: jax.sharding.Mesh | None) -> Rows:
    """Return the batch rows of a batch of clips."""
    both = task.settings.sampling.guided and predicts_both(task)
    return Rows(batch, 1, 2 if both else 1, batch_ways(mesh))


def compare(
    ways: Ways, clips: Clips, score: AddScores, report: Report, mesh: jax.sharding.Mesh | None
) -> Iterator[Row]:
    """Run all ways of sampling, and those that have been added with equal cost.

    Yields each row after it is in the report, with the columns that `score` adds.
    """
    for way in ways.every:
        task, count = ways.task(way), ways.count(way)
        print(f"\n{way.name}: {count}")
        runner = Runner(task, ways.paths, clips, mesh)
        if way.name == DENSE:
            run, trajectory = runner.dense()
            dense, row = run.latents, Row(way.name)
        else:
            run = runner.run()
            row = Row.of_samples(way.name, run.latents, dense)
        for line in runner.walk.outcome():
            print(line)
        row.changes, row.seconds = way.changes, run.seconds
        row.count = count._replace(computed=run.forwards, at_most=False)
        row.of = run_facts(task, runner.resolved.sampler, ways.paths)
        row.same_cost, lacks = ways.add_plain(way, row.count)
        row.notes += [f"no row of the same cost: {lacks}"] if lacks else []
        if (unlike := runner.unlike(trajectory)) is not None:
            row.notes += [] if PLAIN.match(way.name) else [f"no error of a step: {unlike}"]
        elif way.name != DENSE:
            row.steps = runner.error(trajectory)
        row.scores = score(task, way.name, run.latents)
        report.rows.append(row)
        yield row


class Runner:
    """Runs one way of sampling, with its weights on the devices."""

    @sharding.inside_auto_axes()
    def __init__(
        self, task: SamplingTask, paths: Paths, clips: Clips, mesh: jax.sharding.Mesh | None
    ) -> None:
        self.task, self.paths, self.clips = task, paths, clips
        self.mesh = sharding.program_mesh(mesh)
        self.rows = rows_of(task, clips.batch, self.mesh)
        self.resolved = run_of(task, paths, self.rows)
        schedule = self.resolved.sampler.schedule(task.settings.sampling.num_inference_steps)
        told, noise, keys = self._given(0)
        steps, wanted = self.resolved.steps, self.rows.wanted
        how: dict[str, Any] = {"keys": keys, "mesh": self.mesh, "wanted": wanted}
        self.walk = Walk(task, told, noise, schedule, steps, **how)
        self._models: dict[str, Any] = {}

    def _given(self, first: int) -> tuple[Any, jax.Array, jax.Array | None]:
        """Put a batch on the devices, padded with copies of its rows."""
        some = slice(first, first + self.clips.batch)
        guided, rows = self.task.settings.sampling.guided, self.rows
        arrays = {k: x[some] for k, x in self.clips.arrays.items()}
        if not guided:
            arrays = {k: x for k, x in arrays.items() if not k.startswith("negative_")}
        parts = told_in_rows(self.task.completed(arrays), rows, guided)
        told = tuple({k: place(x, self.mesh) for k, x in part.items()} for part in parts)
        noise, keys = (rows.spread(x[some]) for x in (self.clips.noise, self.clips.keys))
        fresh = place(keys, self.mesh) if self.resolved.sampler.renoises else None
        return told, place(noise, self.mesh), fresh

    def run(self, observe: Observe | None = None) -> Run:
        """Draw all clips, batch by batch; call `observe` after each step of the first batch."""
        runs = [self._taken(0, observe)]
        firsts = range(self.clips.batch, len(self.clips.noise), self.clips.batch)
        runs += [self._taken(first) for first in firsts]
        forwards = sum(run.forwards for run in runs) / len(runs)
        latents = np.concatenate([run.latents for run in runs])
        return Run(latents, sum(run.seconds for run in runs), forwards)

    def dense(self) -> tuple[Run, Trajectory]:
        """Draw all clips; return also the state after every step of the first batch."""
        states: list[State] = []
        copying: list[float] = []  # subtracted from the run's seconds

        def observe(i: int, state: State) -> State:
            jax.block_until_ready(state)
            began = time.perf_counter()
            states.append(jax.device_get(state))
            copying.append(time.perf_counter() - began)
            return state

        run, schedule = self.run(observe), self.walk.schedule
        noise = np.float32(schedule.noise_scale) * self.clips.noise[: self.clips.batch]
        found = Trajectory(self.resolved.sampler.name, schedule, noise, states)
        return run._replace(seconds=run.seconds - sum(copying)), found

    def unlike(self, dense: Trajectory) -> str | None:
        """Return why steps cannot start from the dense run's samples; None if they can."""
        name, ours, theirs = self.resolved.sampler.name, self.walk.schedule, dense.schedule
        if name != dense.sampler:
            return f"the sampler is {name}, and the dense run has {dense.sampler}"
        if (steps := len(ours.times)) != (of_dense := len(theirs.times)):
            return f"the run has {steps} steps, and the dense one {of_dense}"
        alike = jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
        return None if alike else "the times of the steps are not those of the dense run"

    def error(self, dense: Trajectory) -> Float[np.ndarray, " B"]:
        """Return the median error of the steps that reuse or approximate, on the first batch.

        Each step starts from the dense run's sample.
        """
        found: list[Float[np.ndarray, " B"]] = []
        wanted = self.rows.wanted

        def observe(i: int, state: State) -> State:
            xs = (state.x, dense.states[i].x, dense.states[i - 1].x if i else dense.noise)
            ours, after, before = (np.asarray(x)[:wanted] for x in xs)
            found.append(_norm(ours - after) / np.maximum(_norm(after - before), 1e-30))
            return _placed(dense.states[i], state, wanted)

        self._taken(0, observe)
        return np.median(np.stack(found)[self._approximate()], axis=0)

    def _approximate(self) -> list[int]:
        """Return the steps of the last run that reuse or approximate; all if none does."""
        decided, steps = self.walk.decided().values(), self.resolved.steps

        def is_so(i: int, step: Step) -> bool:
            usual = Step(guidance="two" if steps.guided[i] else "one", keeps=step.keeps)
            plain = replace(step, number=0, span=None, blocks=0, most=1, model_layers=0) != usual
            reuses = any(letters[i] == "." for letters in decided)
            return reuses or (plain and step.layers != "decide")

        found = [i for i, step in enumerate(steps) if is_so(i, step)]
        return found or list(range(len(steps)))

    @sharding.inside_auto_axes()
    def _taken(self, first: int, observe: Observe | None = None) -> Run:
        """Draw one batch, whose first clip is number `first`."""
        self.walk.begin(*self._given(first))
        self.walk.observe = observe
        with self.walk as walk:
            for expert in (e for e in self.resolved.experts if e.steps):
                if expert.part not in self._models:
                    self._models.clear()  # a device may have room for one
                    model = load(self.task, self.paths, self.mesh, expert.part)
                    self._models[expert.part] = model
                walk.take(self._models[expert.part], expert)
        last = self.task.finished(walk.state.x, walk.told[-1])
        return Run(np.asarray(last)[: self.rows.wanted], walk.bar.seconds, walk.forwards())


def _norm(x: Samples) -> Float[np.ndarray, " B"]:
    return np.sqrt(np.square(x.astype(np.float64)).sum(axis=tuple(range(1, x.ndim))))


def _placed(state: State, like: State, wanted: int) -> State:
    """Put a dense run's state on the devices as another run needs it, padded to its batch."""

    def one(x: Any, other: jax.Array) -> jax.Array:
        rows = np.resize(np.arange(wanted), len(other))
        return jax.device_put(x[rows], other.sharding)

    return jax.tree.map(one, state, like)


def curve_of(runner: Runner) -> Float[np.ndarray, "steps predictions"]:
    """Run dense sampling once; return MagCache's curve for predictions with text and without.

        ratio of step i = mean over tokens and clips of |r_i| / |r_(i-1)|

    where the layers added r_i in step i. The first step of each model has ratios of 1.

    Source: Ma et al. 2025, https://arxiv.org/abs/2506.09045.
    """
    steps = runner.walk.steps
    runner.walk.steps = replace(steps, steps=tuple(replace(step, keeps=1) for step in steps))
    begins = {sum(x.steps for x in runner.resolved.experts[:n]) for n in range(2)}
    samples, wanted = runner.rows.samples, runner.rows.wanted
    before: dict[str, Any] = {}
    found: list[dict[str, float]] = []

    def observe(i: int, state: State) -> State:
        here = _added(runner.walk.kept, samples, wanted)
        last = {} if i in begins else before
        found.append({k: float(_ratio(x, last[k])) if k in last else 1.0 for k, x in here.items()})
        before.clear()
        before.update(here)
        return state

    runner.run(observe)
    runner.walk.steps = steps
    names = ("with", "without") if any(steps.guided) else ("with",)
    return np.array([[row.get(name, row["with"]) for name in names] for row in found])


def _added(kept: Mapping[str, Any], samples: int, wanted: int) -> dict[str, Any]:
    """Return what the layers added in each prediction, for the wanted samples only."""
    found = {name: jax.tree.leaves(added.sums[0][0])[0] for name, added in kept.items()}
    if "both" in found:
        found = dict(zip(("without", "with"), jnp.split(found["both"], 2), strict=True))
    # Copies: the next step donates the saved sums.
    return {name: jnp.array(x[:samples][:wanted]) for name, x in found.items()}


@jax.jit
def _ratio(ours: Any, before: Any) -> Any:
    norm, last = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (ours, before))
    return jnp.mean(norm / jnp.maximum(last, 1e-30))
