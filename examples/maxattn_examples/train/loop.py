"""The loop: checks, then steps, with checkpoints, scalars, a profile and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import maxattn as ma
from maxattn import sharding
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, MaxattnError, escaped
from maxattn.tools.writable import check_writable
from maxattn.tools.xla_options import xla_options
from maxattn_examples.common import hosts
from maxattn_examples.common.hosts import Rows

from . import step as steps
from .checkpoint import Checkpoints, export, is_there
from .data import batches
from .progress import Board, Cost, Profiler, Progress, cost_of, recent
from .samples import Samples
from .settings import TrainingSettings
from .step import Facts, Parts, State, Step, optimizer, schedule
from .task import Arrays, Task

NOT_EXPORTED = (
    "not exported: each process holds a part of every parameter. The same command in one process,"
    " which can read the checkpoint onto its own devices, exports"
)


class Diverged(MaxattnError, ArithmeticError):
    """The loss is not finite."""


class Training:
    """Train a task from the last checkpoint to the last step.

    The constructor checks settings, data and mesh before anything is computed.

    Args:
        mesh: default that of `jax.set_mesh`, else one device.

    Raises:
        ConfigErrors: the data does not fit the model, the batch does not divide, or a checkpoint
            has
            other settings.
    """

    def __init__(self, task: Task, mesh: jax.sharding.Mesh | None = None) -> None:
        self.task, self.mesh = task, sharding.program_mesh(mesh)
        self.training = task.training
        self.folder = Path(self.training.output_dir)
        self.source = task.source()
        self.shapes = self.source.shapes
        if problems := list(self._problems()):
            raise ConfigErrors(problems)
        self.plans = task.plans(self.shapes, self.mesh)

    def _problems(self) -> Iterator[ConfigError]:
        yield from self.task.shape_errors(self.shapes)
        yield from _undivided(self.training, self.mesh)
        count, size = len(self.source), self.training.batch_size
        if count < size:
            rule = f"a batch needs as many different examples, and the data has {count}"
            yield ConfigError("training.batch_size", size, rule, "lower it")
        yield from _refused_options(self.task)

    @sharding.inside_auto_axes()
    def run(self) -> tuple[Any, list[float]]:
        """Train and export; return the model for sampling, and the loss of every step.

        The model has averaged parameters if an average is kept.

        Raises:
            ConfigErrors: the last checkpoint has other settings or other data.
            ConfigError: `training.output_dir` cannot be written to.
            Diverged: the loss is not finite.
        """
        check_writable("training.output_dir", self.folder, folder=True)
        with self._checkpoints(not self.training.resume) as checkpoints:
            for line in opening(self.training, checkpoints, self.plans):
                print(line)
            self.parts, state, fixed = self._begin(checkpoints)
            losses = checkpoints.losses
            if len(losses) < self.training.steps:
                print("\n".join(filter(None, (counted(state.trained, fixed), self.source.note))))
                state = Steps(self, state, fixed, checkpoints, losses).run()
        model = self.parts.model(state.best, fixed)
        if self.training.export:
            written = export(self.task, model, self.folder)
            print(f"exported: {written}" if written else NOT_EXPORTED)
        return model, losses

    def trained(self) -> Any:
        """Return the model of the last checkpoint, averaged if possible; raises as `last` does."""
        parts, state, fixed = self.last()
        return parts.model(state.best, fixed)

    def last(self) -> tuple[Parts, State, Any]:
        """Return the last checkpoint: the model's parts, the state, and the frozen arrays.

        Raises:
            ConfigError: there is no checkpoint, or it has other settings.
        """
        if is_there(self.folder / "checkpoints"):
            with self._checkpoints(writes=False) as checkpoints:
                if checkpoints.step:
                    return self._begin(checkpoints)
        remedy = "train with the same config first (examples/train.py)"
        raise ConfigError("training.output_dir", self.folder, "a checkpoint is in it", remedy)

    def _checkpoints(self, start_again: bool = False, writes: bool = True) -> Checkpoints:
        more, how = {"data.folder": self.source.fingerprint}, (start_again, writes)
        return Checkpoints(self.task.settings, self.training, self.task.fixed, more, *how)

    def _begin(self, checkpoints: Checkpoints) -> tuple[Parts, State, Any]:
        """Make the state, or load it; arrays that a checkpoint replaces are not made."""
        rank, adamw = self.training.lora_rank, optimizer(self.training)
        averaged = self.training.ema_decay > 0
        if checkpoints.step and not rank:
            parts = Parts(steps.abstract(self.task, self.mesh), rank)
            if parts.all_learn:
                return parts, checkpoints.load(parts.form(adamw, averaged, self.mesh)), {}
        model = steps.build(self.task, self.mesh)
        parts, (trained, fixed) = Parts(model, rank), steps.split(model, rank)
        form = parts.form(adamw, averaged, self.mesh)
        if checkpoints.step:
            return parts, checkpoints.load(form), fixed
        return parts, steps.begin(trained, adamw, form), fixed

    def cost(self, state: State, fixed: Any) -> Cost:
        """Count the cost of a step."""

        def forward(trained: Any, fixed: Any, examples: Arrays) -> jax.Array:
            return self.task.loss(self.parts.model(trained, fixed), examples)

        part = self.training.batch_size // self.training.gradient_accumulation_steps
        one = self.source[0]
        batch = {name: jax.ShapeDtypeStruct((part, *x.shape), x.dtype) for name, x in one.items()}
        examples = jax.eval_shape(self.task.noised, batch, self.source.empty, jax.random.key(0))
        tokens = self.task.tokens(self.shapes)
        return cost_of(self.training, tokens, self.mesh, forward, state.trained, fixed, examples)

    @property
    def rows(self) -> Rows:
        """The batch rows that this process loads."""
        return hosts.rows_here(self.training.batch_size, self.mesh)

    def placed(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Put this process' batch rows on the devices."""
        size = self.training.batch_size
        place = partial(hosts.on_devices, rows=self.rows, batch_size=size, mesh=self.mesh)
        return {name: place(array) for name, array in batch.items()}


class Steps:
    """Run the remaining steps.

    Args:
        losses: of the steps so far; new ones are appended.
    """

    def __init__(
        self, run: Training, state: State, fixed: Any, checkpoints: Checkpoints, losses: list[float]
    ) -> None:
        self.parent, self.state, self.fixed = run, state, fixed
        self.checkpoints, self.losses = checkpoints, losses
        self.training, first = run.training, len(losses)
        self.cost = run.cost(state, fixed)
        empty = {name: hosts.everywhere(x, run.mesh) for name, x in run.source.empty.items()}
        self._step = Step(run.task, run.parts, fixed, empty, steps.shardings(state))
        self._data = batches(run.source, self.training.batch_size, self.training.seed, run.rows)
        if checkpoints.step:
            self._data.set_state(checkpoints.facts["data"])
        self._profiler = Profiler(run.task.settings, run.folder / "profile", first)
        self._board = Board(
            run.folder / "tensorboard" if self.training.tensorboard else None, first
        )
        self._progress = Progress(self.training, self.cost, first)
        wanted = self.training.picture_every
        self._samples = Samples(run.task, run.source, run.parts, run.mesh) if wanted else None

    def run(self) -> State:
        """Run the steps; return the final state."""
        with self._board, self._progress:
            batch = self._next_batch()
            for done in range(len(self.losses) + 1, self.training.steps + 1):
                batch, facts, position = self._one(batch, done)
                self._progress.advance(self.losses)
                self._report(done, facts, position)
        return self.state

    def _next_batch(self) -> dict[str, jax.Array]:
        return self.parent.placed(next(self._data))

    def _one(self, batch: Arrays, done: int) -> tuple[Arrays, Facts, Any]:
        """Run one step; return the next batch, the step's figures, and the position in the data."""
        with self._profiler.around(done - 1):
            self.state, facts = self._step(self.state, batch)
            position = deepcopy(self._data.get_state())
            # The next batch travels to the devices while they compute.
            batch = {} if done == self.training.steps else self._next_batch()
            self.losses.append(_finite(facts, done))
        return batch, facts, position

    def _report(self, done: int, facts: Facts, position: Any) -> None:
        training, last = self.training, done == self.training.steps
        if done % training.log_every == 0 or last:
            self._write(facts)
        if done % training.checkpoint_every == 0 or last:
            self.checkpoints.save(self.state, position, self.losses, self.parent.plans)
        if self._samples is not None and done % training.picture_every == 0:
            path = self._samples(self.state.best, self.fixed, done)
            print(escaped(f"samples after {done} steps: {path}"))
            self._progress.pause()

    def _write(self, facts: Facts) -> None:
        seconds = self._progress.seconds
        scalars: dict[str, float | None] = {
            "loss": recent(self.losses),
            "learning_rate": float(np.asarray(schedule(self.training)(len(self.losses) - 1))),
            "gradient_norm": float(facts.gradient_norm),
        }
        if seconds:
            scalars["tokens_per_second"] = self.cost.tokens / seconds
            scalars["mfu"] = self.cost.mfu(seconds)
        self._board.write(len(self.losses), **scalars)


def _finite(facts: Facts, step: int) -> float:
    loss = float(facts.loss)
    if not math.isfinite(loss):
        rule = f"the loss must be finite, and at step {step} it is not"
        remedy = "lower the learning rate, or go on from the last checkpoint with another"
        raise Diverged("loss", loss, rule, remedy)
    return loss


def _refused_options(task: Task) -> Iterator[ConfigError]:
    asked = {"training.compiler_options": task.training.compiler_options}
    if task.training.picture_every:
        asked["sampling.compiler_options"] = task.settings.sampling.compiler_options
    for setting, words in asked.items():
        try:
            xla_options(words, setting)
        except ConfigError as refused:
            yield refused


def _undivided(training: TrainingSettings, mesh: jax.sharding.Mesh | None) -> list[ConfigError]:
    ways = sharding.ways("B", sharding.mesh_shape(mesh))
    part = training.batch_size // training.gradient_accumulation_steps
    if part % ways == 0:
        return []
    count = training.gradient_accumulation_steps
    parts = f"each of its {count} parts is" if count > 1 else "it is"
    rule = f"{parts} spread evenly over the {ways} devices of data and fsdp"
    remedy = f"use a multiple of {ways * count}, or other ici_*_parallelism"
    return [ConfigError("training.batch_size", training.batch_size, rule, remedy)]


def opening(
    training: TrainingSettings, checkpoints: Checkpoints, plans: dict[str, ma.Plan]
) -> Iterator[str]:
    """Return the plans, the step to continue from, and the changes since the checkpoint."""
    yield from (plan.explain() for plan in plans.values())
    done, wanted = checkpoints.step, training.steps
    if not done:
        yield f"training {wanted} steps from the start; checkpoints in {checkpoints.folder}"
        if checkpoints.replaced:
            last = checkpoints.replaced[-1]
            yield f"  those there, up to step {last}, are deleted when the first new one is whole"
        return
    if done >= wanted:
        yield f"training is complete: {done} of {wanted} steps in {checkpoints.folder}"
        yield "training.resume=false trains anew"
        return
    yield f"going on from step {done} of {wanted}, in {checkpoints.folder}"
    yield from _changes(checkpoints, wanted, plans)


def _changes(checkpoints: Checkpoints, steps: int, plans: dict[str, ma.Plan]) -> Iterator[str]:
    before = checkpoints.facts["settings"]["training"]["steps"]
    if before != steps:
        follows = "a learning rate that depends on it follows the new one from here"
        yield f"  training.steps was {before}: {follows}"
    for role, plan in plans.items():
        earlier = checkpoints.facts["plans"].get(role)
        changes = ["it was not there"] if earlier is None else plan.diff(earlier)
        yield from (f"  {role}-attention changed: {line}" for line in changes)


def counted(trained: Any, fixed: Any) -> str:
    """Return the numbers of trained and of frozen parameters, as text."""
    learn, rest = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (trained, fixed))
    stay = f", {rest / 1e6:,.2f} million stay" if rest else ""
    return f"{learn / 1e6:,.2f} million parameters learn{stay}"
