"""The devices of a TPU topology, described by libtpu without a TPU; unknown ones are refused."""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from math import prod
from typing import Any

from maxattn.config.errors import plain
from maxattn.errors import ConfigError, MeshError, Unsupported
from maxattn.tools.compile.job import PYTHON_VARIABLE, CompileJob

CHIPS_OF_A_HOST = 4


def devices_of(job: CompileJob) -> list[Any]:
    """Return the devices of the topology, the first `job.devices` of them."""
    devices = _described(job.topology, job.slices)
    if job.devices is not None and not 1 <= job.devices <= len(devices):
        rule = f"{job.topology} has {len(devices)} devices"
        remedy = f"write --devices {len(devices)}, or a larger topology"
        raise MeshError("devices", job.devices, rule, remedy)
    return devices[: job.devices]


@lru_cache
def one_device(topology: str) -> Any:
    """Return the first device of a topology, which is described once."""
    return _described(topology, 1)[0]


def _described(topology: str, slices: int) -> list[Any]:
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        rule = f"the TPU's compiler comes with libtpu, and {plain(sys.executable)} has none"
        remedy = f'pip install "maxattn[tpu]" there, or name another python in {PYTHON_VARIABLE}'
        raise Unsupported("compile", "libtpu is not installed", rule, remedy)
    # Beside the name libtpu must be told: one device a chip of v4, and hosts of fewer than 4 chips.
    generation, _, layout = topology.partition(":")
    options: dict[str, Any] = {"chip_config_name": "megacore"} if generation == "v4" else {}
    sides = [int(n) for n in layout.split("x") if n.isdecimal()]
    if sides and prod(sides) < CHIPS_OF_A_HOST:
        options["chips_per_host_bounds"] = (*sides, 1, 1)[:3]
    if slices > 1:
        options["num_slices"] = slices
    try:
        return list(topologies.get_topology_desc(topology, "tpu", **options).devices)
    except (RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or ["no message"])[0]
        rule = f"libtpu knows no such topology ({first[:160]})"
        remedy = (
            "write a generation and its chips along each side: v4:2x2x1, v5e:2x2, v5e:4x4,"
            " v5p:2x2x1, v5p:2x2x2, v6e:2x2, v6e:2x4, tpu7x:2x2x1"
        )
        raise ConfigError("target", topology, rule, remedy) from None
