"""The loop: checks first, then steps, with checkpoints, a bar, TensorBoard, a profile and pictures
along the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxattn import sharding
from maxattn.config.errors import ConfigErrors
from maxattn.errors import ConfigError, MaxattnError
from maxattn.tools.writable import check_writable
from maxattn.tools.xla_options import xla_options

from . import hosts
from . import state as states
from .board import Board
from .checkpoint import Checkpoints
from .cost import Cost, cost_of
from .data import Rows, batches
from .export import export
from .opening import counted, opening
from .optimizer import optimizer, schedule
from .profiler import Profiler
from .progress import Progress, recent
from .samples import Samples
from .settings import TrainingSettings
from .state import Parts, State
from .step import Facts, Step
from .task import Arrays, Task

NOT_EXPORTED = (
    "not exported: each process holds a part of every parameter. The same command in one process,"
    " which can read the checkpoint onto its own devices, exports"
)


class Diverged(MaxattnError, ArithmeticError):
    """The loss is no number any more."""


class Training:
    """Train a task from the last checkpoint to the last step.

    Everything that can be wrong with settings, data and mesh is said when this is made, before
    anything is computed.

    Args:
        task: what is learned.
        mesh: devices to train on; None for one.

    Raises:
        ConfigErrors: the data does not fit the model, the batch does not divide, a checkpoint is of
        other settings.
    """

    def __init__(self, task: Task, mesh: jax.sharding.Mesh | None = None) -> None:
        self.task, self.mesh = task, mesh
        self.training = task.training
        self.folder = Path(self.training.output_dir)
        self.source = task.source()
        self.shapes = self.source.shapes
        problems = [*task.wrong(self.shapes), *_undivided(self.training, mesh)]
        if len(self.source) < self.training.batch_size:
            rule = f"a batch has as many different examples, and the data holds {len(self.source)}"
            problems.append(
                ConfigError("training.batch_size", self.training.batch_size, rule, "lower it")
            )
        problems += _refused_options(task)
        if problems:
            raise ConfigErrors(problems)
        self.plans = task.plans(self.shapes, mesh)

    def run(self) -> tuple[Any, list[float]]:
        """Train and export; return the model that draws (the average, where one is kept) and the
        loss of every step.

        Raises:
            ConfigErrors: the last checkpoint was made with other settings, or other data.
            ConfigError: nothing can be written to `training.output_dir`.
            Diverged: the loss is no number any more.
        """
        check_writable("training.output_dir", self.folder, folder=True)
        with self._checkpoints(not self.training.resume) as checkpoints:
            for line in opening(self.training, checkpoints, self.plans):
                print(line)
            self.parts, state, fixed = self._begin(checkpoints)
            losses = checkpoints.losses
            if len(losses) < self.training.steps:
                print("\n".join(filter(None, (counted(state.trained, fixed), self.source.note))))
                state = self._steps(state, fixed, checkpoints, losses)
        model = self.parts.model(state.best, fixed)
        if self.training.export:
            written = export(self.task, model, self.folder)
            print(f"exported: {written}" if written else NOT_EXPORTED)
        return model, losses

    def trained(self) -> Any:
        """Return the model of the last checkpoint: the average, where one is kept; `last` says what
        it raises.
        """
        parts, state, fixed = self.last()
        return parts.model(state.best, fixed)

    def last(self) -> tuple[Parts, State, Any]:
        """Return the last checkpoint: how the model is put together, what was trained, and what
        stayed.

        Raises:
            ConfigError: there is no checkpoint, or it belongs to other settings.
        """
        if not (self.folder / "checkpoints").is_dir():
            rule, remedy = (
                "it holds a checkpoint",
                "train with the same config first (examples/train_wan.py, train_sdxl.py)",
            )
            raise ConfigError("training.output_dir", self.folder, rule, remedy)
        with self._checkpoints() as checkpoints:
            return self._begin(checkpoints)

    def _checkpoints(self, start_again: bool = False) -> Checkpoints:
        more = {"data.folder": self.source.fingerprint}
        return Checkpoints(self.task.settings, self.training, self.task.fixed, more, start_again)

    def _begin(self, checkpoints: Checkpoints) -> tuple[Parts, State, Any]:
        """Put the state together: from the checkpoint where there is one, and then nothing is made
        that it replaces.
        """
        rank, adamw = self.training.lora_rank, optimizer(self.training)
        averaged = self.training.ema_decay > 0
        if checkpoints.step and not rank:
            parts = Parts(states.abstract(self.task, self.mesh), rank)
            if parts.all_learn:
                return parts, checkpoints.load(parts.form(adamw, averaged, self.mesh)), {}
        model = states.build(self.task, self.mesh)
        parts, (trained, fixed) = Parts(model, rank), states.split(model, rank)
        form = parts.form(adamw, averaged, self.mesh)
        return (
            parts,
            checkpoints.load(form) if checkpoints.step else states.begin(trained, adamw, form),
            fixed,
        )

    def _cost(self, state: State, fixed: Any) -> Cost:
        def forward(trained: Any, fixed: Any, examples: Arrays) -> jax.Array:
            return self.task.loss(self.parts.model(trained, fixed), examples)

        part = self.training.batch_size // self.training.gradient_accumulation_steps
        one = self.source[0]
        batch = {name: jax.ShapeDtypeStruct((part, *x.shape), x.dtype) for name, x in one.items()}
        examples = jax.eval_shape(self.task.noised, batch, self.source.empty, jax.random.key(0))
        tokens = self.task.tokens(self.shapes)
        return cost_of(self.training, tokens, self.mesh, forward, state.trained, fixed, examples)

    @property
    def _rows(self) -> Rows:
        return hosts.rows_here(self.training.batch_size, self.mesh)

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        place = partial(
            hosts.on_devices, rows=self._rows, batch_size=self.training.batch_size, mesh=self.mesh
        )
        return {name: place(array) for name, array in batch.items()}

    def _steps(
        self, state: State, fixed: Any, checkpoints: Checkpoints, losses: list[float]
    ) -> State:
        """Take the steps that are left; `losses` grows."""
        training, first = self.training, len(losses)
        data = batches(self.source, training.batch_size, training.seed, self._rows)
        if checkpoints.step:
            data.set_state(checkpoints.facts["data"])
        empty = {
            name: hosts.everywhere(array, self.mesh) for name, array in self.source.empty.items()
        }
        cost = self._cost(state, fixed)
        step = Step(self.task, self.parts, fixed, empty, states.places(state))
        profiler = Profiler(self.task.settings, self.folder / "profile", first)
        samples = (
            Samples(self.task, self.source, self.parts, self.mesh)
            if training.picture_every
            else None
        )
        board = Board(self.folder / "tensorboard" if training.tensorboard else None, first)
        with board, Progress(training, cost, first) as progress:
            batch = self._placed(next(data))
            for done in range(first + 1, training.steps + 1):
                last = done == training.steps
                with profiler.around(done - 1):
                    state, facts = step(state, batch)
                    place = deepcopy(data.get_state())
                    # The next batch travels to the devices while they compute.
                    batch = {} if last else self._placed(next(data))
                    losses.append(_finite(facts, done))
                progress.advance(losses)
                if done % training.log_every == 0 or last:
                    self._write(board, cost, losses, facts, progress.seconds)
                if done % training.checkpoint_every == 0 or last:
                    checkpoints.save(state, place, losses, self.plans)
                if samples is not None and done % training.picture_every == 0:
                    print(f"samples after {done} steps: {samples(state.best, fixed, done)}")
                    progress.pause()
        return state

    def _write(
        self, board: Board, cost: Cost, losses: list[float], facts: Facts, seconds: float | None
    ) -> None:
        speed = (
            {"tokens_per_second": cost.tokens / seconds, "mfu": cost.mfu(seconds)}
            if seconds
            else {}
        )
        rate = float(np.asarray(schedule(self.training)(len(losses) - 1)))
        norm = float(facts.gradient_norm)
        board.write(
            len(losses), loss=recent(losses), learning_rate=rate, gradient_norm=norm, **speed
        )


def _finite(facts: Facts, step: int) -> float:
    loss = float(facts.loss)
    if not math.isfinite(loss):
        rule, remedy = (
            f"training goes on while it is a number, and at step {step} it is none",
            "lower the learning rate",
        )
        raise Diverged(
            "loss", loss, rule, f"{remedy}, or go on from the last checkpoint with another"
        )
    return loss


def _refused_options(task: Task) -> Iterator[ConfigError]:
    """Yield what the compiler refuses for the step, and for the samples along the way."""
    asked = {"training.compiler_options": task.training.compiler_options}
    if task.training.picture_every:
        asked["sampling.compiler_options"] = task.settings.sampling.compiler_options
    for setting, words in asked.items():
        try:
            xla_options(words, setting)
        except ConfigError as refused:
            yield refused


def _undivided(training: TrainingSettings, mesh: jax.sharding.Mesh | None) -> list[ConfigError]:
    """Refuse a batch whose parts do not divide over the mesh."""
    ways = sharding.ways("B", sharding.mesh_shape(mesh))
    part = training.batch_size // training.gradient_accumulation_steps
    if part % ways == 0:
        return []
    count = training.gradient_accumulation_steps
    parts = f"each of its {count} parts is" if count > 1 else "it is"
    rule = f"{parts} spread evenly over the {ways} devices of data and fsdp"
    remedy = f"use a multiple of {ways * count}, or other ici_*_parallelism"
    return [ConfigError("training.batch_size", training.batch_size, rule, remedy)]
