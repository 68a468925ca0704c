"""The training loop: what is learned, one step of it, and going on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.errors import ConfigError

from . import digits, hosts
from .checkpoint import Checkpoints
from .flow import loss_of
from .model import Video, WanTransformer, Words
from .opening import opening, plans_of
from .progress import Progress
from .settings import Settings, TrainingSettings


class TrainState(nnx.Module):
    """Hold all that a step changes: parameters, their average, and the optimiser with its step count.

    Args:
        settings: of everything.
        mesh: devices to train on; default the one there is.
    """

    def __init__(self, settings: Settings, mesh: jax.sharding.Mesh | None = None) -> None:
        training = settings.training
        self.model = WanTransformer(settings, mesh, rngs=nnx.Rngs(training.seed))
        # The same seed again, not a copy: a donated buffer must not be in two places.
        self.average = WanTransformer(settings, mesh, rngs=nnx.Rngs(training.seed))
        self.optimizer = nnx.Optimizer(self.model, optimizer(training), wrt=nnx.Param)
        sharding.place(self, mesh)

    @property
    def step(self) -> int:
        """Steps taken."""
        return int(self.optimizer.step[...])


def optimizer(training: TrainingSettings) -> optax.GradientTransformation:
    """Make AdamW with a warm-up, then a cosine down to a hundredth, and gradients clipped to norm 1.

    Args:
        training: learning rate, its schedule and the weight decay.
    """
    peak = training.learning_rate
    steps = max(training.steps, training.warmup_steps + 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, training.warmup_steps, steps, 0.01 * peak)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=training.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@partial(nnx.jit, static_argnames="training", donate_argnums=0)
def train_step(state: TrainState, video: Video, words: Words, training: TrainingSettings) -> Float[Array, ""]:
    """Take one step, in place, and return the loss before it.

    Args:
        state: changed; its old arrays are given up.
        video: a batch of clean videos.
        words: token ids of their prompts.
        training: rates and shifts.
    """
    step = state.optimizer.step[...]
    key = jax.random.fold_in(jax.random.key(training.seed), step)
    loss, gradient = nnx.value_and_grad(loss_of)(state.model, video, words, key, training)
    state.optimizer.update(state.model, gradient)
    follow(state.average, state.model, jnp.minimum(training.ema_decay, (1.0 + step) / (10.0 + step)))
    return loss


def follow(average: nnx.Module, model: nnx.Module, decay: Float[Array, ""]) -> None:
    """Move an average of parameters towards the parameters: decay * average + (1 - decay) * model."""
    old, new = nnx.state(average, nnx.Param), nnx.state(model, nnx.Param)
    nnx.update(average, jax.tree.map(lambda a, b: decay * a + (1.0 - decay) * b, old, new))


def train(settings: Settings, mesh: jax.sharding.Mesh | None = None) -> tuple[TrainState, list[float]]:
    """Train from the last checkpoint to the last step; return the state and the loss of every step.

    Args:
        settings: of everything.
        mesh: devices to train on; default the one there is.

    Raises:
        ConfigErrors: the checkpoint belongs to other settings.
    """
    training = settings.training
    with Checkpoints(settings, start_again=not training.resume) as checkpoints:
        plans = plans_of(settings, mesh)
        for line in opening(settings, checkpoints, plans):
            print(line)
        state = TrainState(settings, mesh)
        rows = hosts.rows_here(training.batch_size, mesh)
        data = digits.batches(settings.data, training.batch_size, training.seed, rows)
        if checkpoints.step:
            checkpoints.load(state, data)
        losses = checkpoints.losses
        if len(losses) < training.steps:
            facts = {role: plan.to_dict() for role, plan in plans.items()}
            place = partial(hosts.on_devices, rows=rows, batch_size=training.batch_size, mesh=mesh)
            _run(state, data, losses, settings, place, lambda: checkpoints.save(state, data, losses, facts))
    return state, losses


def trained(settings: Settings, mesh: jax.sharding.Mesh | None = None) -> TrainState:
    """Load the last checkpoint.

    Args:
        settings: those that it was trained with; how to draw may differ.
        mesh: devices to draw on; default the one there is.

    Raises:
        ConfigError: there is none, or it belongs to other settings.
    """
    folder = settings.training.output_dir
    if not (Path(folder) / "checkpoints").is_dir():
        rule, remedy = "it holds a checkpoint to draw from", "run examples/train_wan.py with the same config first"
        raise ConfigError("training.output_dir", folder, rule, remedy)
    with Checkpoints(settings) as checkpoints:
        state = TrainState(settings, mesh)
        checkpoints.load(state)
    return state


def _run(
    state: TrainState,
    data: Iterator[digits.Batch],
    losses: list[float],
    settings: Settings,
    place: Callable[[np.ndarray], Array],
    save: Callable[[], None],
) -> None:
    training, first = settings.training, len(losses)
    # Walks through the modules once, not once a step.
    step_of_state = nnx.cached_partial(train_step, state)
    profiler = Profiler(settings, first)
    with Progress(settings, first) as progress:
        for step in range(first, training.steps):
            with profiler.around(step):
                batch = next(data)
                video, words = place(batch["video"]), place(batch["tokens"])
                losses.append(float(step_of_state(video, words, training=training)))
            progress.advance(losses)
            if (step + 1) % training.checkpoint_every == 0 or step + 1 == training.steps:
                save()


class Profiler:
    """Record `profiler_steps` steps, after `skip_first_n_steps_for_profiler`, into the output folder.

    Args:
        settings: the profiler's keys.
        first: the first step of this run.
    """

    def __init__(self, settings: Settings, first: int) -> None:
        self.folder = Path(settings.training.output_dir) / "profile"
        start = first + settings.skip_first_n_steps_for_profiler
        self.steps = range(start, start + settings.profiler_steps) if settings.enable_profiler else range(0)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record this step, if it is one of those asked for."""
        if step in self.steps[:1]:
            jax.profiler.start_trace(str(self.folder))
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step in self.steps[-1:]:
            jax.profiler.stop_trace()
            print(f"profile of steps {self.steps[0]} to {self.steps[-1]} in {self.folder}")
