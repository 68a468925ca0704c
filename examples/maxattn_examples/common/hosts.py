"""Runs of many processes: joining them, the batch rows that each loads, and which one prints.

Each process runs the same program over the same mesh; `jax.distributed` connects them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

from maxattn import sharding
from maxattn.errors import ConfigError

Rows = Int[np.ndarray, " rows"]
OPTIONS = ("--coordinator", "--num-processes", "--process-id")
ALL_THREE = (
    "give --coordinator HOST:PORT --num-processes N --process-id I, or --distributed where a"
    " cluster says them"
)


def join(
    coordinator: str | None, num_processes: int | None, process_id: int | None, detect: bool = False
) -> None:
    """Join the processes of a run, before jax uses a device; do nothing if joined or alone.

    Args:
        coordinator: host:port of process 0.
        detect: let jax find all three, as it can on a TPU pod, under SLURM, Open MPI and
            Kubernetes.

    Raises:
        ConfigError: some of the three are missing, or do not fit together.
    """
    told = (coordinator, num_processes, process_id)
    if jax.distributed.is_initialized():
        return
    if detect:
        jax.distributed.initialize()
    elif any(value is not None for value in told):
        _check(dict(zip(OPTIONS, told, strict=True)))
        jax.distributed.initialize(*told)


def _check(told: dict[str, Any]) -> None:
    for name, value in told.items():
        if value is None:
            raise ConfigError(name, "not given", "several processes need all three", ALL_THREE)
    address, count, index = told.values()
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        rule = "it is the host and port of process 0"
        raise ConfigError("--coordinator", address, rule, "write HOST:PORT")
    if not 0 <= index < count:
        rule = f"it must be between 0 and {count - 1}"
        raise ConfigError("--process-id", index, rule, "give each process its own number")


def is_first() -> bool:
    """Check whether this is process 0, which prints and writes pictures."""
    return jax.process_index() == 0


@contextmanager
def first_speaks() -> Iterator[None]:
    """Silence standard output of all processes but the first; errors of all are printed."""
    if is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def wait(where: str) -> None:
    """Wait until every process has called this."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def rows_here(batch_size: int, mesh: jax.sharding.Mesh | None) -> Rows:
    """List the batch rows that this process' devices hold; other processes may hold them too.

    Args:
        mesh: axes data and fsdp split the batch; None keeps all rows here.
    """
    if mesh is None:
        return np.arange(batch_size)
    held = sharding.batch_sharding(mesh, 1).addressable_devices_indices_map((batch_size,))
    rows = [np.arange(batch_size)[index] for index in held.values() if index is not None]
    return np.unique(np.concatenate(rows))


def on_devices(
    local: np.ndarray, rows: Rows, batch_size: int, mesh: jax.sharding.Mesh | None
) -> Array:
    """Put a batch on the devices, its first axis split over data and fsdp.

    Args:
        local: the batch rows that `rows_here` lists, in that order.
        mesh: None puts them on this process' device.
    """
    if mesh is None:
        return jax.numpy.asarray(local)
    shape = (batch_size, *local.shape[1:])

    def shard(index: Any) -> np.ndarray:
        return local[np.searchsorted(rows, np.arange(batch_size)[index[0]])]

    return jax.make_array_from_callback(shape, sharding.batch_sharding(mesh, local.ndim), shard)


def everywhere(array: np.ndarray, mesh: jax.sharding.Mesh | None) -> Array:
    """Replicate an array on every device of a mesh; None: on this process' device."""
    if mesh is None:
        return jax.numpy.asarray(array)
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def whole(array: Array) -> np.ndarray:
    """Return the whole of an array that is split over processes, on each process."""
    if jax.process_count() == 1:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def alone(what: str) -> None:
    """Refuse a run of several processes.

    Args:
        what: the part of the program that needs whole arrays, for the message.

    Raises:
        ConfigError: there are several processes.
    """
    if (count := jax.process_count()) > 1:
        rule = f"{what} needs whole arrays in one process"
        remedy = "run one process, which can use all devices of a machine"
        raise ConfigError("--num-processes", count, rule, remedy)


def name() -> str:
    """Return this process's number, to begin its errors with; empty if it is the only one."""
    joined = jax.distributed.is_initialized()
    return f"process {jax.process_index()} of {jax.process_count()}: " if joined else ""
