"""The kinds of cases: each file draws one kind."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from random import Random
from typing import NamedTuple

from tests.fuzz.case import Case, Machine


class Category(NamedTuple):
    """Say what is drawn, and what part of the time it gets.

    Args:
        title: for the table.
        weight: cases of it beside those of others.
    """

    title: str
    weight: int


CATEGORIES = {
    "attention": Category("attention on one device", 10),
    "meshes": Category("attention on meshes", 4),
    "transforms": Category("transformations of attention", 5),
    "modules": Category("modules", 3),
    "plans": Category("plans for other machines", 12),
    "commands": Category("command lines", 20),
    "yaml": Category("configs in YAML", 50),
    "weights": Category("weights in safetensors", 25),
    "lora": Category("LoRA files and alphas", 25),
    "latents": Category("folders of latents", 12),
    "checkpoints": Category("checkpoints", 2),
    "tuned": Category("the file of tuned sizes", 8),
}


def draw(name: str, seed: int, machine: Machine) -> Case:
    """Draw one case: the same for the same category, seed and machine."""
    make: Callable[[Random, int, Machine], Case]
    make = import_module(f"{__name__}.{name}").draw
    return make(Random(f"{name}:{seed}"), seed, machine)
