"""The arrays of a model in training: trained parameters, their average, the optimizer, the rest.

Between steps everything is nested dicts of arrays with their final shardings; a step merges them
into the module. A checkpoint has a whole `State` and nothing else of the model: with LoRA, only the
changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxattn import sharding

from . import lora
from .task import Task

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
        self._trained, self._fixed = (jax.tree.map(_shape, state) for state in (trained, fixed))

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


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


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
