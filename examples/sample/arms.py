"""Ways of sampling that are compared: changes of one config, and plain runs of the same cost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import yaml
from fast import steps

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from sample.paths import Paths
from sample.planned import planned_steps
from sample.task import SamplingTask

DENSE, FLOOR = "dense", "floor"
KERNELS = {"gpu": "cudnn", "cpu": "flash", "tpu": "flash"}  # of the floor
FORM = "write lines such as `half: {num_inference_steps: 25}`"
MakeTask = Callable[[Sequence[str]], SamplingTask]


class Arm(NamedTuple):
    """One way of sampling.

    Args:
        name: in tables.
        changes: of the keys of `sampling`, or of any other by its dotted name.
        same_cost: the name of plain sampling in fewer steps that computes as many forwards.
    """

    name: str
    changes: Mapping[str, Any]
    same_cost: str | None = None

    def overrides(self, keys: Any) -> list[str]:
        """Return the changes as the command line writes them; `keys` are those of `sampling`."""
        named = (
            (f"sampling.{k}" if k.split(".")[0] in keys else k, v) for k, v in self.changes.items()
        )
        return [f"{key}={json.dumps(value)}" for key, value in named]


class Count(NamedTuple):
    """The forwards of a run.

    Args:
        computed: that are computed, counted in layers where some are not.
        whole: of the same run without shortcuts.
    """

    computed: float
    whole: int


def add_options(parser: argparse.ArgumentParser) -> Any:
    """Add the options that name ways of sampling; return what adds more beside them."""
    add = parser.add_argument_group("what is compared").add_argument
    add("--settings", type=Path, metavar="FILE", help="YAML: keys of sampling by name")
    told = "one more way of sampling: a name, then KEY=VALUE"
    add("--setting", nargs="+", action="append", default=[], metavar="NAME", help=told)
    told = "another kernel of attention, for the floor; default cudnn on a GPU, else flash; or none"
    add("--floor", metavar="KERNEL", help=told)
    return add


def with_floor(arms: Sequence[Arm], kernel: str | None) -> list[Arm]:
    """Add dense sampling with another kernel behind the dense one, unless the kernel is "none"."""
    kernel = kernel or KERNELS.get(jax.default_backend(), "flash")
    floor = () if kernel == "none" else (Arm(FLOOR, {"fast": None, "attention": kernel}),)
    return [arms[0], *floor, *arms[1:]]


def read_arms(path: Path | None, given: Sequence[Sequence[str]]) -> list[Arm]:
    """Read ways of sampling, the dense one first.

    Args:
        path: of a YAML file: a mapping of keys of `sampling` by name.
        given: more, each a name and changes KEY=VALUE.

    Raises:
        ConfigErrors: the file is no such mapping, or a change is not written so.
    """
    said: dict[str, Any] = {DENSE: {"fast": None}}
    if path is not None:
        said |= _mapping(path)
    for name, *changes in given:
        pairs = [change.partition("=") for change in changes]
        if wrong := [key for key, between, _ in pairs if not between]:
            rule = "a change of a way of sampling is KEY=VALUE"
            remedy = "write num_inference_steps=25"
            raise ConfigErrors([ConfigError("--setting", wrong[0], rule, remedy)])
        said[name] = {key: yaml.safe_load(value) for key, _, value in pairs}
    return [Arm(name, changes or {}) for name, changes in said.items()]


def _mapping(path: Path) -> dict[str, Any]:
    try:
        said = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        rule = "it names a YAML file of ways of sampling"
        raise ConfigErrors([ConfigError("--settings", f"{path}: {error}", rule, FORM)]) from None
    whole = isinstance(said, dict) and all(isinstance(x, dict | None) for x in said.values())
    if not whole:
        rule = "it has a mapping of keys of `sampling` for each name"
        raise ConfigErrors([ConfigError("--settings", path, rule, FORM)])
    return said


def forwards(task: SamplingTask, paths: Paths) -> Count:
    """Count the forwards of a run of these settings.

    Raises:
        ConfigError: `sampling.fast` does not fit the run.
    """
    planned = planned_steps(task, task.sampler(), paths)
    return Count(*steps.forwards(planned, task.layers, task.settings.sampling.guided))


def with_same_cost(arms: Sequence[Arm], make: MakeTask, paths: Paths) -> list[Arm]:
    """Add to each way of sampling with a section `fast` plain sampling in fewer steps.

    Args:
        arms: ways of sampling.
        make: a task of overrides.
        paths: of the weights.
    """
    found: dict[str, Arm] = {}
    for arm in arms:
        task = task_of(arm, make)
        if task.settings.sampling.fast is None:
            found[arm.name] = arm
            continue
        count, number = forwards(task, paths), task.settings.sampling.num_inference_steps
        fewer = max(1, round(count.computed / count.whole * number))
        kept = {key: x for key, x in arm.changes.items() if key.split(".")[0] != "fast"}
        plain = {**kept, "fast": None, "num_inference_steps": fewer}
        others = (f"{key}={x}" for key, x in kept.items() if key != "num_inference_steps")
        name = ", ".join([f"{fewer} plain steps", *others])
        found[arm.name] = arm._replace(same_cost=name)
        found.setdefault(name, Arm(name, plain))
    return list(found.values())


def task_of(arm: Arm, make: MakeTask) -> SamplingTask:
    """Return the task of a way of sampling.

    Raises:
        ConfigErrors: its settings do not fit.
    """
    plain = make(())
    task = make(arm.overrides(type(plain.settings.sampling).model_fields))
    if problems := list(task.size_errors()):
        raise ConfigErrors(problems)
    return task
