"""The batch: its rows, their devices and noise, and the shapes of prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from maxattn import sharding

from .files import MAY_LACK
from .task import Arrays, SamplingTask

TOKENS = {"text": 77, "image": 257}  # of CLIP; other encoders' are a setting


@dataclass(frozen=True)
class Rows:
    """The numbers of batch rows of a run.

    Args:
        texts: different prompts.
        count: samples of each prompt.
        calls: batch rows of the model per sample: 2 if both predictions are in one call.
        ways: devices that the batch is split over.
    """

    texts: int
    count: int
    calls: int
    ways: int

    @property
    def wanted(self) -> int:
        """The number of samples that the user wants."""
        return self.texts * self.count

    @property
    def samples(self) -> int:
        """The number of samples drawn; those beyond `wanted` only make the batch divide."""
        step = self.ways // math.gcd(self.ways, self.calls)
        return -(-self.wanted // step) * step

    def __str__(self) -> str:
        said = f"{self.wanted} samples in {self.calls * self.samples} rows of the model"
        if self.samples == self.wanted:
            return said
        filled = self.calls * (self.samples - self.wanted)
        devices = f"{filled} of them to fill up the {self.ways} devices of data and fsdp"
        instead = "ici_context_parallelism spreads one sample over several devices instead"
        return f"{said}, {devices}\n          {instead}"

    def spread(self, array: np.ndarray) -> np.ndarray:
        """Repeat an array's rows, one for each text or one for all, to one for each sample."""
        of_text = np.arange(self.texts) if len(array) == self.texts else np.zeros(self.texts, int)
        return array[np.resize(np.repeat(of_text, self.count), self.samples)]


def batch_ways(mesh: jax.sharding.Mesh | None) -> int:
    """Return the number of devices that a batch is split over."""
    return sharding.ways("B", sharding.mesh_shape(mesh))


def place(array: np.ndarray, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Put an array that every process has on the devices, batch split if it divides."""
    if mesh is None:
        return jnp.asarray(array)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    divides = array.shape[0] % batch_ways(mesh) == 0
    where = sharding.batch_sharding(mesh, array.ndim) if divides else whole
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def noise(seed: int, rows: Rows, shape: tuple[int, ...]) -> np.ndarray:
    """Draw standard normal noise; a row's noise depends only on the seed and its number.

    Args:
        shape: of one sample.
    """
    keys = (jax.random.fold_in(jax.random.key(seed), row) for row in range(rows.samples))
    return np.stack([np.asarray(jax.random.normal(key, shape)) for key in keys])


def told_in_rows(arrays: Arrays, rows: Rows, guided: bool) -> tuple[Arrays, ...]:
    """Arrange the model's conditions: one dict of arrays for each call of a step.

    Args:
        arrays: of an embeddings file.
        guided: whether the negative prompt's rows come before the prompt's.
    """
    spread = {name: rows.spread(array) for name, array in arrays.items()}
    negative = {name for name in spread if name.startswith("negative_")}
    meant = {name: array for name, array in spread.items() if name not in negative}
    if not guided:
        return (meant,)
    unmeant = meant | {name.removeprefix("negative_"): spread[name] for name in negative}
    if rows.calls == 1:
        return (unmeant, meant)
    return ({name: np.concatenate([unmeant[name], array]) for name, array in meant.items()},)


def assumed_lengths(task: SamplingTask) -> dict[str, int]:
    """Return the tokens of a prompt, and of an image if the model takes one."""
    text = getattr(task.settings.sampling, "text_tokens", TOKENS["text"])
    image = {"image": TOKENS["image"]} if "image" in task.expected(False) else {}
    return {"text": text} | image


def assumed(task: SamplingTask) -> Arrays:
    """Return zeros in the shapes of one encoded prompt."""
    lengths = assumed_lengths(task)
    forms = task.expected(task.settings.sampling.guided).items()

    def size(name: str, axis: int | str) -> int:
        return axis if isinstance(axis, int) else lengths[name.removeprefix("negative_")]

    shapes = {
        name: tuple(size(name, axis) for axis in form)
        for name, form in forms
        if name not in MAY_LACK
    }
    return {name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}
