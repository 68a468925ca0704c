"""One step (noise, gradients of the parts of a batch, clipping, AdamW, the average), its state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.tools.xla_options import xla_options

from . import lora
from .settings import TrainingSettings
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


# ---- what a step changes -------------------------------------------------------------------------
# Between steps everything is nested dicts of arrays with their final shardings; a step merges them
# into the module. A checkpoint has a whole `State` and nothing else of the model: with LoRA, only
# the changes.

Tree = Any  # nested dicts of arrays


class State(NamedTuple):
    """All arrays that a step updates."""

    step: jax.Array  # number of updates
    trained: Tree  # parameters
    average: Tree  # their running average; empty if none is kept
    optimizer: Tree  # moments and counts

    @property
    def best(self) -> Tree:
        """The parameters for sampling and export: the average if there is one."""
        return self.average or self.trained


class Parts:
    """Split and merge a model's trained and frozen parameters.

    Args:
        model: with or without arrays.
        lora_rank: if above 0, only LoRA's parameters are trained.
    """

    def __init__(self, model: nnx.Module, lora_rank: int) -> None:
        self.graph, trained, fixed = nnx.split(model, _kind(lora_rank), ...)
        self._trained, self._fixed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (trained, fixed)
        )

    def model(self, trained: Tree, fixed: Tree) -> Any:
        """Merge parameters into the model."""
        return nnx.merge(self.graph, _filled(self._trained, trained), _filled(self._fixed, fixed))

    @property
    def all_learn(self) -> bool:
        """Whether no parameter is frozen."""
        return not jax.tree.leaves(self._fixed)

    def form(
        self,
        optimizer: optax.GradientTransformation,
        averaged: bool,
        mesh: jax.sharding.Mesh | None,
    ) -> State:
        """Return the shapes, dtypes and shardings of a state without making it."""
        trained = nnx.to_pure_dict(self._trained)
        shapes = jax.eval_shape(lambda t: _first(t, optimizer, averaged), trained)
        if mesh is None:
            here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.tree.map(lambda x: _placed(x, here), shapes)
        return jax.tree.map(_placed, shapes, self._shardings(shapes, optimizer, mesh))

    def _shardings(
        self, shapes: State, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
    ) -> State:
        """Return the sharding of each array of a state; moments have their parameter's."""
        whole: Any = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        trained = nnx.to_pure_dict(sharding.parameter_shardings(self._trained, mesh))
        moments = optax.tree_utils.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            shapes.optimizer,
            trained,
            transform_non_params=lambda _: whole,
        )
        return State(whole, trained, trained if shapes.average else {}, moments)


def split(model: nnx.Module, lora_rank: int) -> tuple[Tree, Tree]:
    """Return the trained arrays of a model, and the frozen ones."""
    _, trained, fixed = nnx.split(model, _kind(lora_rank), ...)
    return nnx.to_pure_dict(trained), nnx.to_pure_dict(fixed)


def begin(trained: Tree, optimizer: optax.GradientTransformation, form: State) -> State:
    """Return the state before the first step."""
    # Committed to their devices, as the arrays of later steps are: else the first step would be
    # compiled apart from the others.
    trained = jax.device_put(trained, shardings(form.trained))
    moments = jax.jit(optimizer.init, out_shardings=shardings(form.optimizer))(trained)
    # Copies: a donated array must not be in the state twice.
    average = jax.tree.map(jnp.copy, trained) if form.average else {}
    step = jax.device_put(jnp.zeros((), jnp.int32), form.step.sharding)
    return State(step, trained, average, moments)


def shardings(form: Any) -> Any:
    """Return the shardings of a tree of arrays or their shapes."""
    return jax.tree.map(lambda x: x.sharding, form)


def _first(trained: Tree, optimizer: optax.GradientTransformation, averaged: bool) -> State:
    average = trained if averaged else {}
    return State(jnp.zeros((), jnp.int32), trained, average, optimizer.init(trained))


def _kind(lora_rank: int) -> type[nnx.Variable]:
    return nnx.LoRAParam if lora_rank else nnx.Param


def _placed(x: jax.ShapeDtypeStruct, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _filled(form: nnx.State, tree: Tree) -> nnx.State:
    state = jax.tree.map(lambda x: x, form)
    nnx.replace_by_pure_dict(state, tree)
    return state


# ---- the model before the first step -------------------------------------------------------------


def abstract(task: Task, mesh: jax.sharding.Mesh | None) -> nnx.Module:
    """Build the model without arrays and without LoRA."""
    return nnx.eval_shape(lambda: task.build(mesh, nnx.Rngs(task.training.seed)))


def build(task: Task, mesh: jax.sharding.Mesh | None) -> nnx.Module:
    """Build the model with its initial weights on the mesh, with LoRA if `lora_rank` is set.

    Weights of a folder are read directly onto their devices; random ones are made there.
    """
    training, model = task.training, abstract(task, mesh)
    if not task.load(model, mesh):
        _randomly(task, model, mesh)
    if training.lora_rank:
        how = (training.lora_rank, training.lora_alpha, training.lora_targets)
        lora.add(model, *how, rngs=nnx.Rngs(training.seed + 1))
        sharding.place(model, mesh)
    return model


def _randomly(task: Task, model: nnx.Module, mesh: jax.sharding.Mesh | None) -> None:
    def make() -> nnx.State:
        return nnx.state(task.build(mesh, nnx.Rngs(task.training.seed)))

    where = None if mesh is None else sharding.parameter_shardings(jax.eval_shape(make), mesh)
    nnx.update(model, jax.jit(make, out_shardings=where)())
