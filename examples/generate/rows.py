"""The batch: which rows there are, on which devices they lie, and the noise that each begins
with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from maxattn import sharding

from .kind import Arrays


@dataclass(frozen=True)
class Rows:
    """Count the rows of a run.

    Args:
        texts: different prompts.
        count: samples of each.
        calls: rows of the model for a sample: 2 where guidance is in the same call.
        ways: devices that the batch is spread over.
    """

    texts: int
    count: int
    calls: int
    ways: int

    @property
    def wanted(self) -> int:
        """Samples that are asked for."""
        return self.texts * self.count

    @property
    def samples(self) -> int:
        """Samples that are drawn: the model's rows divide over the devices, and what fills them up
        is thrown away.
        """
        step = self.ways // math.gcd(self.ways, self.calls)
        return -(-self.wanted // step) * step

    def __str__(self) -> str:
        said = f"{self.wanted} samples in {self.calls * self.samples} rows of the model"
        if self.samples == self.wanted:
            return said
        filled = self.calls * (self.samples - self.wanted)
        ways = "ici_context_parallelism spreads one sample over several devices instead"
        return (
            f"{said}, {filled} of them to fill up the {self.ways} devices of data and fsdp\n       "
            f"   {ways}"
        )

    def spread(self, array: np.ndarray) -> np.ndarray:
        """Repeat an array's rows, one for each text or one for all, so that there is one for each
        sample.
        """
        rows = np.repeat(
            np.arange(self.texts) if len(array) == self.texts else np.zeros(self.texts, int),
            self.count,
        )
        return array[np.resize(rows, self.samples)]


def batch_ways(mesh: jax.sharding.Mesh | None) -> int:
    """Count the devices that a batch is spread over."""
    shape = dict(sharding.mesh_shape(mesh))
    return math.prod(shape.get(axis, 1) for axis in sharding.BATCH_AXES)


def place(array: np.ndarray, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Put an array that every process has on the devices: its rows over data and fsdp where they
    divide.
    """
    if mesh is None:
        return jnp.asarray(array)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    where = (
        whole if array.shape[0] % batch_ways(mesh) else sharding.batch_sharding(mesh, array.ndim)
    )
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def noise(seed: int, rows: Rows, shape: tuple[int, ...]) -> np.ndarray:
    """Draw standard normal noise: that of a row depends on seed and row alone.

    Args:
        seed: of all.
        rows: how many.
        shape: of one sample.
    """
    key = jax.random.key(seed)
    return np.stack(
        [
            np.asarray(jax.random.normal(jax.random.fold_in(key, row), shape))
            for row in range(rows.samples)
        ]
    )


def told_in_rows(arrays: Arrays, rows: Rows, guided: bool) -> tuple[Arrays, ...]:
    """Arrange what the model is told: one dict of arrays for each call of a step.

    Args:
        arrays: of an embeddings file.
        rows: of the run.
        guided: whether what is not meant comes before what is.
    """
    spread = {name: rows.spread(array) for name, array in arrays.items()}
    meant = {name: array for name, array in spread.items() if not name.startswith("negative_")}
    if not guided:
        return (meant,)
    unmeant: Mapping[str, np.ndarray] = meant | {
        name.removeprefix("negative_"): array
        for name, array in spread.items()
        if name.startswith("negative_")
    }
    if rows.calls == 1:
        return (dict(unmeant), meant)
    return ({name: np.concatenate([unmeant[name], array]) for name, array in meant.items()},)
