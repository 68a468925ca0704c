"""Attention on meshes: every strategy x meshes of up to eight devices x kernels x masks."""

from __future__ import annotations

from math import prod
from random import Random
from typing import Any

from tests.fuzz.calls import BOTH, FORWARD, WAIT, call_text, check_of, config_text, facts_of
from tests.fuzz.case import Case, Machine
from tests.fuzz.kernels import draw_settings
from tests.fuzz.mask_trees import Sizes
from tests.fuzz.operands import LENGTHS, draw_operands

STRATEGIES = ("all_gather", "ring", "ring", "ulysses", "ulysses_ring", "ulysses_ring", "auto")
AXES = ("data", "fsdp", "context", "tensor")


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw a call over a mesh of the devices that there are."""
    axes = draw_axes(rng, machine.devices)
    operands = draw_operands(rng, machine, draw_sizes(rng, axes))
    settings = mesh_settings(rng, machine, axes)
    run = BOTH if rng.random() < 0.7 else FORWARD
    source = operands.text() + config_text(settings, operands.hidden) + mesh_text(axes)
    source += call_text(operands, mesh=True) + run + WAIT
    facts = facts_of(
        operands, kernel=settings["attention"], strategy=settings.get("context_parallel")
    )
    return Case("meshes", seed, source, check_of(operands), facts=facts, seconds=120)


def mesh_text(axes: dict[str, int]) -> str:
    """Write the mesh, over the first devices."""
    return f"mesh = config.make_mesh(jax.devices()[:{prod(axes.values())}])\n"


def draw_axes(rng: Random, devices: int) -> dict[str, int]:
    """Draw sizes of axes whose product the devices reach; context has most of them."""
    axes: dict[str, int] = {}
    for axis in ("context", *rng.sample(AXES, 4)):
        room = devices // prod(axes.values())
        size = rng.choice([1, 1, 2, 2, 3, 4, 6, 8] if axis == "context" else [1, 1, 1, 2, 2, 3, 4])
        if axis not in axes and size <= room:
            axes[axis] = size
    return axes


def draw_sizes(rng: Random, axes: dict[str, int]) -> Sizes:
    """Draw sizes that mostly divide over the axes."""
    batch = axes.get("data", 1) * axes.get("fsdp", 1)
    batch = rng.choice([batch, batch, batch, 2 * batch, batch + 1]) if batch < 4 else batch
    tensor, each = axes.get("tensor", 1), rng.choice([1, 2, 3])
    heads = tensor * each
    kv_heads = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    t, s = rng.choice(LENGTHS[:13]), rng.choice(LENGTHS[:13])
    return Sizes(
        batch, t, t if rng.random() < 0.7 else s, heads, kv_heads, rng.choice([2, 8, 8, 16, 33])
    )


def mesh_settings(rng: Random, machine: Machine, axes: dict[str, int]) -> dict[str, Any]:
    """Draw a kernel, a strategy and what the strategies read."""
    settings = draw_settings(rng, machine) | {"context_parallel": rng.choice(STRATEGIES)}
    settings |= {f"ici_{axis}_parallelism": size for axis, size in axes.items() if size > 1}
    settings.setdefault("ici_data_parallelism", 1)
    if rng.random() < 0.4:
        settings["ulysses_shards"] = rng.choice([1, 2, 3, 4])
    if rng.random() < 0.3:
        settings["ulysses_attention_chunks"] = rng.choice([1, 2, 3])
    if rng.random() < 0.3:
        settings["ring_direction"] = rng.choice(["one_way", "both_ways"])
    return settings
