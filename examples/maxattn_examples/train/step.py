"""One training step: noise, gradients over parts of the batch, clipping, AdamW, the average."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from maxattn.tools.xla_options import xla_options

from .settings import TrainingSettings
from .state import Parts, State, Tree
from .task import Arrays, Task


class Facts(NamedTuple):
    """The figures of a step."""

    loss: Float[Array, ""]  # before the update
    gradient_norm: Float[Array, ""]  # over all gradients, before clipping


class Step:
    """The compiled training step, which donates the old state.

    Raises:
        ConfigError: the compiler does not know an option.
    """

    def __init__(
        self, task: Task, parts: Parts, fixed: Tree, empty: Arrays, shardings: Any
    ) -> None:
        self.task, self.parts, self.fixed, self.empty = task, parts, fixed, empty
        self.training = task.training
        self.optimizer = optimizer(self.training)
        how: dict[str, Any] = {
            # Left to the compiler, a small parameter may come back with another sharding, and the
            # next step would compile anew.
            "out_shardings": (shardings, None),
            "compiler_options": xla_options(
                self.training.compiler_options, "training.compiler_options"
            ),
        }
        self._run = jax.jit(self._step, donate_argnums=0, **how)

    def __call__(self, state: State, batch: Arrays) -> tuple[State, Facts]:
        """Return the state after one step; the old state's arrays are donated."""
        return self._run(state, self.fixed, batch, self.empty)

    def _step(self, state: State, fixed: Tree, batch: Arrays, empty: Arrays) -> tuple[State, Facts]:
        key = jax.random.fold_in(jax.random.key(self.training.seed), state.step)
        examples = self.task.noised(batch, empty, key)
        loss, gradient = self.gradients(state.trained, fixed, examples)
        updates, moments = self.optimizer.update(gradient, state.optimizer, state.trained)
        trained = optax.apply_updates(state.trained, updates)
        # Young averages forget faster, or they would remember where training began.
        decay = jnp.minimum(self.training.ema_decay, (1.0 + state.step) / (10.0 + state.step))
        average = followed(state.average, trained, decay) if state.average else {}
        facts = Facts(loss, optax.tree.norm(gradient))
        return State(state.step + 1, trained, average, moments), facts

    def gradients(
        self, trained: Tree, fixed: Tree, examples: Arrays
    ) -> tuple[Float[Array, ""], Tree]:
        """Return the loss over all examples and its gradients, accumulated over parts."""

        def loss(trained: Tree, some: Arrays) -> Float[Array, ""]:
            return self.task.loss(self.parts.model(trained, fixed), some)

        of_some, count = jax.value_and_grad(loss), self.training.gradient_accumulation_steps
        if count == 1:
            return of_some(trained, examples)

        def add(sums: Any, some: Arrays) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, of_some(trained, some)), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (jnp.zeros(()), trained))
        sums, _ = jax.lax.scan(add, zeros, parts_of(examples, count))
        return jax.tree.map(lambda x: x / count, sums)


def parts_of(examples: Arrays, count: int) -> Arrays:
    """Split a batch into parts along a new first axis; part i has the batch rows i, i + count, ...

    Neighbouring rows are on one device, so every part is spread over all devices.
    """
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), examples)


def followed(average: Tree, trained: Tree, decay: Float[Array, ""]) -> Tree:
    """Compute decay * average + (1 - decay) * trained."""

    def moved(a: Array, b: Array) -> Array:
        return (decay * a + (1.0 - decay) * b).astype(a.dtype)

    return jax.tree.map(moved, average, trained)


def schedule(training: TrainingSettings) -> optax.Schedule:
    """Return the learning rate by step: linear warmup, then constant or a cosine."""
    peak, warmup = training.learning_rate, training.warmup_steps
    if training.learning_rate_schedule == "cosine":
        last = max(training.steps, warmup + 1)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, last, 0.01 * peak)
    if not warmup:  # optax's warm-up of no steps would stay at zero for ever
        return optax.constant_schedule(peak)
    return optax.warmup_constant_schedule(0.0, peak, warmup)


def optimizer(training: TrainingSettings) -> optax.GradientTransformation:
    """Make AdamW with weight decay on every trained parameter."""
    how: dict[str, Any] = {
        "weight_decay": training.weight_decay,
        "mu_dtype": training.moment_dtype,
    }
    adamw = optax.adamw(schedule(training), training.adam_b1, training.adam_b2, **how)
    longest = training.max_grad_norm
    clip = optax.clip_by_global_norm(longest) if longest else optax.identity()
    return optax.chain(clip, adamw)
