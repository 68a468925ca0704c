"""The examples in public docstrings run, and the most used objects have one.

An example is written for Python's doctest. It runs in an empty folder, with `ma`, `jax`, `jnp`,
`np` and `nnx` imported.
"""

from __future__ import annotations

from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, DocTest, DocTestFinder, DocTestRunner
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import masks, weights

PUBLIC: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (ma, masks, weights)
    for name in module.__all__
    if not isinstance(getattr(module, name), (int, ModuleType))
}
# What `&`, `|` and `~` make, and what all masks have in common, are shown by the others.
CLASSES = {name: value for name, value in PUBLIC.items() if isinstance(value, type)}
MADE = (masks.Mask, masks.And, masks.Or, masks.Not)
KINDS = [n for n, x in CLASSES.items() if issubclass(x, masks.Mask) and x not in MADE]
CALLED = [
    "AttentionConfig", "Call", "CrossAttention", "FlaxAttention", "JointAttention", "Target",
    "apply_rotary", "attention", "attention_fn", "plan", "remat", "rope_1d", "rope_2d", "rope_3d",
    "swap",
]  # fmt: skip
SHOWN = [
    *(f"maxattn.{name}" for name in CALLED),
    *(f"maxattn.weights.{name}" for name in ("load_diffusers", "merge_lora", "save_diffusers")),
    *KINDS,
]


def doctests(name: str) -> list[DocTest]:
    """Return the examples in the docstrings of a public object and of its methods."""
    names = {"ma": ma, "jax": jax, "jnp": jnp, "np": np, "nnx": nnx}
    found = DocTestFinder().find(PUBLIC[name], name, module=False, globs=names)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = DocTestRunner(optionflags=ELLIPSIS | NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in doctests(name):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_user_calls_first_has_an_example(name):
    # In its own docstring or in that of a method, such as `Call.of`.
    assert doctests(name), f"{name} has no example"
