"""Ways of sampling that are compared: changes of one config, and plain runs of the same cost."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from itertools import count as count_from
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import yaml

import maxattn as ma
from maxattn import sharding
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, MaxattnError
from maxattn_examples.sample.files import Paths
from maxattn_examples.sample.resolve import resolved, with_attention
from maxattn_examples.sample.task import SamplingTask
from maxattn_examples.samplers.sampler import KEYS, Given

DENSE, FLOOR = "dense", "floor"
# Names that a way of sampling cannot have, and what they mean.
TAKEN = {DENSE: "sampling without shortcuts", FLOOR: "another kernel's"}
DEVICES = re.compile("ici_|dcn_|mesh_axes")  # begins the keys that say where a run is
PLAIN = re.compile(r"\d+ plain steps\b")  # begins the names of those of the same cost
# Keys of `sampling` that say what is drawn: every way of sampling has the same.
DRAWN = (
    *("seed", "height", "width", "frames", "fps", "count", "per_prompt"),
    *("prompt", "negative_prompt", "text_tokens"),
)
# Of the floor: the first one that dense sampling does not have.
KERNELS = {
    "gpu": ("cudnn", "flash"),
    "cpu": ("flash", "dot_product"),
    "tpu": ("flash", "tpu_flash"),
}
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

    @classmethod
    def of(cls, name: str, said: Mapping[Any, Any]) -> Self:
        """Take changes as they are written: `fast` and `sampling.fast` are one key."""
        flat = dict(said)
        if isinstance(flat.get("sampling"), Mapping):
            flat |= flat.pop("sampling")
        return cls(name, {str(key).removeprefix("sampling."): x for key, x in flat.items()})

    def overrides(self, keys: Any) -> list[str]:
        """Return the changes as the command line writes them; `keys` are those of `sampling`."""
        named = (
            (f"sampling.{k}" if k.split(".")[0] in keys else k, v) for k, v in self.changes.items()
        )
        return [f"{key}={json.dumps(value, default=str)}" for key, value in named]


class Count(NamedTuple):
    """The forwards of a run.

    Args:
        computed: that are computed, counted in layers where some are not.
        whole: of the same run without shortcuts.
        at_most: whether steps decide, and have not yet.
    """

    computed: float
    whole: int
    at_most: bool = False

    def __str__(self) -> str:
        return f"{'at most ' * self.at_most}{self.computed:g} of {self.whole} forwards"


def add_options(parser: argparse.ArgumentParser) -> Any:
    """Add the options that name ways of sampling; return what adds more beside them."""
    add = parser.add_argument_group("what is compared").add_argument
    add("--settings", type=Path, metavar="FILE", help="YAML: keys of sampling by name")
    told = "one more way of sampling: a name, then KEY=VALUE"
    add("--setting", nargs="+", action="append", default=[], metavar="NAME", help=told)
    told = "another kernel of attention than the config's, for the floor; or none"
    add("--floor", metavar="KERNEL", help=told)
    return add


def with_floor(
    arms: Sequence[Arm], asked: str | None, make: MakeTask, name: Callable[[SamplingTask], str]
) -> list[Arm]:
    """Add dense sampling with another kernel behind the dense one.

    Args:
        arms: ways of sampling, the dense one first.
        asked: a kernel; None for one that dense sampling does not have; "none" adds nothing.
        make: a task of overrides.
        name: names the kernel of a task's self-attention.

    Raises:
        ConfigErrors: dense sampling has that kernel, or it cannot run.
    """
    if asked == "none":
        return [*arms]
    task = task_of(arms[0], make)
    ours, known = name(task), KERNELS.get(jax.default_backend(), ("flash",))
    others: dict[str, str] = {}
    for kernel in (*((asked,) if asked else ()), *known):
        try:
            others[kernel] = name(with_attention(task, tuple(keys_of(task, kernel).items())))
        except MaxattnError as error:
            if kernel == asked:
                rule = error.problems[0].rule if isinstance(error, ConfigErrors) else error.rule
                remedy = "name another kernel, or give --floor none"
                raise ConfigErrors([ConfigError("--floor", kernel, rule, remedy)]) from None
    free = [kernel for kernel, theirs in others.items() if theirs != ours]
    if not free and asked is None:
        print(f"no floor: no other kernel than {ours} is known to run here (--floor)")
        return [*arms]
    if not free or (asked and asked != free[0]):
        rule = f"it is another kernel than dense sampling has, which is {ours}"
        remedy = " or ".join(f"--floor {kernel}" for kernel in (*free, "none"))
        raise ConfigErrors([ConfigError("--floor", asked, rule, f"give {remedy}")])
    return [arms[0], Arm(FLOOR, {"fast": None, **keys_of(task, free[0])}), *arms[1:]]


def read_arms(
    path: Path | None, given: Sequence[Sequence[str]], taken: Mapping[str, str] = TAKEN
) -> list[Arm]:
    """Read ways of sampling, the dense one first.

    Args:
        path: of a YAML file: a mapping of keys of `sampling` by name.
        given: more, each a name and changes KEY=VALUE.
        taken: names that none of them has, and what these mean.

    Raises:
        ConfigErrors: the file is no such mapping, a change is not written so, or a name is taken.
    """
    said: dict[str, Any] = {} if path is None else {str(x): y for x, y in _mapping(path).items()}
    problems = [problem for name in said for problem in _name_errors("--settings", name, taken)]
    for name, *changes in given:
        problems += _name_errors("--setting", name, taken)
        if name in said:
            rule = "each way of sampling has a name of its own, and two have this one"
            problems.append(ConfigError("--setting", name, rule, "give it another name"))
        said[name] = dict(map(_change, changes))
    if problems:
        raise ConfigErrors(problems)
    return [Arm(DENSE, {"fast": None}), *(Arm.of(name, x or {}) for name, x in said.items())]


def _name_errors(setting: str, name: str, taken: Mapping[str, str]) -> Iterator[ConfigError]:
    meant = ", ".join(f"{key} is {what}" for key, what in taken.items())
    rule = f"{meant}, and N plain steps are those of the same cost"
    if name in taken or PLAIN.match(name):
        yield ConfigError(setting, name, rule, "give it another name")


def _change(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE.

    Raises:
        ConfigErrors: it is not written so, or the value is no YAML.
    """
    key, between, value = text.partition("=")
    if not between:
        rule = "a change of a way of sampling is KEY=VALUE"
        raise ConfigErrors([ConfigError("--setting", key, rule, "write num_inference_steps=25")])
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        why = getattr(error, "problem", None) or error
        rule = f"the value of a key is YAML, and reading it failed: {why}"
        remedy = 'close each bracket and quote, as in "fast={preset: gentle}"'
        raise ConfigErrors([ConfigError("--setting", text, rule, remedy)]) from None


def _mapping(path: Path) -> dict[str, Any]:
    try:
        said = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        rule = "it names a YAML file of ways of sampling"
        raise ConfigErrors([ConfigError("--settings", f"{path}: {error}", rule, FORM)]) from None
    whole = isinstance(said, dict) and all(isinstance(x, dict | None) for x in said.values())
    if not whole:
        rule = "it has a mapping of keys of `sampling` for each name"
        raise ConfigErrors([ConfigError("--settings", path, rule, FORM)])
    return said


@sharding.inside_auto_axes()
def self_kernel(
    task: SamplingTask, *, rows: int, lengths: Mapping[str, int], mesh: jax.sharding.Mesh | None
) -> str:
    """Name the kernel of self-attention, with rows of the model in a call and lengths of texts."""
    plans = task.plans(rows, lengths, sharding.program_mesh(mesh)).values()
    names = (plan.kernel.name for plan in plans if plan.call.role == "self")
    return ", ".join(dict.fromkeys(names))


def forwards(task: SamplingTask, paths: Paths) -> Count:
    """Count the forwards of a run of these settings.

    Raises:
        ConfigError: `sampling.fast` does not fit the run.
    """
    steps = resolved(task, paths).steps
    return Count(steps.forwards, steps.whole, "?" in steps.letters)


def keys_of(task: SamplingTask, kernel: str) -> dict[str, str | None]:
    """Return the settings under which a task's self-attention has a kernel, and its strategy."""
    try:
        ma.AttentionConfig(attention_kernel=task.settings.attention)
    except ConfigErrors:  # other values of `attention` name a strategy too
        return {"attention_kernel": kernel}
    named = task.settings.attention_kernel is not None
    return {"attention": kernel, **({"attention_kernel": None} if named else {})}


def add_plain(ways: list[Arm], arm: Arm, count: Count, make: MakeTask) -> tuple[Arm, str]:
    """Add plain sampling in fewer steps behind a way of sampling with a section `fast`.

    Args:
        ways: of sampling, the dense one first; nothing is added if one of them is that plain one.
        arm: one of them, which has run.
        count: of the forwards that it computed.
        make: a task of overrides.

    Returns:
        The way, which names the plain one; and why there is none, or "".
    """
    sampling = task_of(arm, make).settings.sampling
    if sampling.fast is None:
        return arm, ""
    number, own = sampling.num_inference_steps, Given.of(sampling.__dict__)
    fewer = max(1, round(count.computed / count.whole * number))
    left_out = {"num_inference_steps", *(KEYS if own is not None else ())}
    kept = {key: x for key, x in sorted(arm.changes.items()) if key.split(".")[0] != "fast"}
    said = {key: x for key, x in kept.items() if key not in left_out}
    # Of a list, as many values as there are steps; a distilled model has lists of its own.
    if own is not None and sampling.distilled is None:
        if fewer > number:
            return arm, f"{fewer} plain steps cost as much, and {own.setting} has {number} values"
        said[own.key] = [own.values[i * number // fewer] for i in range(fewer)]
    plain = Arm("", {**kept, **said, "fast": None, "num_inference_steps": fewer})
    try:
        settings = task_of(plain, make).settings
    except ConfigErrors as error:
        return arm, f"{fewer} plain steps cost as much, and {error.problems[0].rule}"
    others = [x for x in ways if x.name == DENSE or PLAIN.match(x.name)]
    found = next((x for x in others if task_of(x, make).settings == settings), None)
    if found is None:
        told = [f"{key}={x}" for key, x in said.items() if key in kept]
        name = textwrap.shorten(", ".join([f"{fewer} plain steps", *told]), 60, placeholder=" ...")
        free = chain([name], (f"{name} ({n})" for n in count_from(2)))
        names = {x.name for x in others}
        found = plain._replace(name=next(x for x in free if x not in names))
        ways.insert(ways.index(arm) + 1, found)
    return arm._replace(same_cost=found.name), ""


def task_of(arm: Arm, make: MakeTask) -> SamplingTask:
    """Return the task of a way of sampling.

    Raises:
        ConfigErrors: its settings do not fit, or it draws other samples.
    """
    plain = make(())
    task = make(arm.overrides(type(plain.settings.sampling).model_fields))
    if problems := [*_other_samples(arm, task, plain)] or list(task.size_errors()):
        raise ConfigErrors(problems)
    return task


def _other_samples(arm: Arm, task: SamplingTask, plain: SamplingTask) -> Iterator[ConfigError]:
    """Yield what would change the samples that are drawn, and not the way alone."""
    rule = "every way of sampling draws the same prompts from the same noise, in the same size"
    ours, theirs = task.settings.sampling, plain.settings.sampling
    keys = [key for key in DRAWN if getattr(ours, key, None) != getattr(theirs, key, None)]
    for key in keys:
        remedy = f"leave {key} out here; before --setting, sampling.{key}=VALUE is for all"
        yield ConfigError("--setting", f"{arm.name}: {key}={getattr(ours, key)}", rule, remedy)
    devices = [key for key in vars(task.settings) if DEVICES.match(key)]
    for key in devices:
        if (value := getattr(task.settings, key)) != getattr(plain.settings, key):
            rule = "every way of sampling runs on the same devices, spread in the same way"
            remedy = f"leave {key} out here; before --setting, {key}=VALUE is for all"
            yield ConfigError("--setting", f"{arm.name}: {key}={value}", rule, remedy)
    if (folder := task.settings.model.folder) != plain.settings.model.folder:
        rule = "every way of sampling has the weights of --model"
        remedy = "leave it out here, and run the command once for each model"
        yield ConfigError("--setting", f"{arm.name}: model.folder={folder}", rule, remedy)
    if not keys and task.latents != plain.latents:
        sizes = f"latents {list(task.latents)}, and without it {list(plain.latents)}"
        remedy = "leave out the key that changes the size"
        yield ConfigError("--setting", f"{arm.name}: {sizes}", rule, remedy)
