"""The ways of sampling to compare: changes of one config, and plain runs of equal cost."""

from __future__ import annotations

import argparse
import json
import math
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
from maxattn_examples import families
from maxattn_examples.digits.settings import Settings as DigitsSettings
from maxattn_examples.sample.check import check_plan
from maxattn_examples.sample.command import AddOptions, arguments_of, paths_of, settings_of
from maxattn_examples.sample.inputs import Paths
from maxattn_examples.sample.resolve import resolved, with_attention
from maxattn_examples.sample.task import SamplingTask
from maxattn_examples.samplers.sampler import KEYS, Given

from .report import DENSE, FLOOR, Count

REAL, CONFIGURED = "real", "as configured"
# Names that a way of sampling cannot have, and what they mean.
TAKEN = {
    DENSE: "sampling without shortcuts",
    FLOOR: "another kernel's",
    REAL: "real clips",
    CONFIGURED: "the config's own sampling.fast",
}
DEVICES = re.compile("ici_|dcn_|mesh_axes")  # prefixes of the keys that set the devices
PLAIN = re.compile(r"\d+ plain steps\b")  # begins the names of those of the same cost
# Keys of `sampling` that change the samples, and must be equal in all ways.
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
FAST = ("fast", "fast_2")
FORM = "write lines such as `half: {num_inference_steps: 25}`"
ROUNDED = 1e-6  # of a forward
MakeTask = Callable[[Sequence[str]], SamplingTask]


def opened(
    description: str | None, arguments: Sequence[str] | None, more: AddOptions
) -> tuple[argparse.Namespace, MakeTask, Paths]:
    """Parse a command line, which may begin with a family.

    Returns:
        The arguments; a function that makes a task from overrides; and the files and folders.
    """
    family, words = families.named(arguments)
    found = arguments_of(families.help_of(description or "", family), words, family or "wan", more)
    kind = families.settings_class(family or families.of_file(found.config, found.overrides))
    settings = settings_of(found, kind)
    if isinstance(settings, DigitsSettings) and settings.on_torus:
        rule = "the streaming demo takes no files, and has samplers of its own"
        remedy = "use configs/digits_large.yml, or a config of Wan, SDXL or Flux.1"
        raise ConfigError("config", found.config, rule, remedy)
    paths = paths_of(found, settings.model.folder)

    def make(changes: Sequence[str]) -> SamplingTask:
        settings = settings_of(found, kind, changes)
        return families.sampling_task(settings)(settings, paths.model)

    return found, make, paths


class Way(NamedTuple):
    """One way of sampling: changes of keys of `sampling`, or of other keys by dotted name."""

    name: str
    changes: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, said: Mapping[Any, Any]) -> Self:
        """Make a way from the user's changes; `fast` and `sampling.fast` are one key."""
        flat = dict(said)
        if isinstance(flat.get("sampling"), Mapping):
            flat |= flat.pop("sampling")
        return cls(name, {str(key).removeprefix("sampling."): x for key, x in flat.items()})

    def overrides(self, keys: Any) -> list[str]:
        """Return the changes as command-line overrides; `keys` are the keys of `sampling`."""
        named = (
            (f"sampling.{k}" if k.split(".")[0] in keys else k, v) for k, v in self.changes.items()
        )
        return [f"{key}={json.dumps(value, default=str)}" for key, value in named]


class Ways:
    """All ways of sampling with checked settings; the dense one is first.

    Args:
        settings: a YAML file that maps names to keys of `sampling`.
        given: further ways, each a name and changes KEY=VALUE.
        alone: whether the dense one may be the only one.

    Attributes:
        every: the ways; ways of equal cost are added while it is iterated over.

    Raises:
        ConfigErrors: settings do not fit, a way draws other samples, or nothing is compared.
    """

    def __init__(
        self,
        make: MakeTask,
        paths: Paths,
        settings: Path | None,
        given: Sequence[Sequence[str]],
        alone: bool = False,
    ) -> None:
        self.make, self.paths, self.plain = make, paths, make(())
        sampling = self.plain.settings.sampling
        self._off = {key: None for key in FAST if key in type(sampling).model_fields}
        self.every = [Way(DENSE, self._off), *_read(settings, given)]
        own = sampling.model_dump(mode="json", exclude_unset=True, include=set(FAST))
        if fast := {key: value for key, value in own.items() if value is not None}:
            self.every.append(Way(CONFIGURED, fast))
        if len(self.every) == 1 and not alone:
            rule = "there is no way of sampling to compare with the dense one"
            remedy = "give --settings FILE or --setting NAME KEY=VALUE, or write sampling.fast"
            raise ConfigErrors([ConfigError("--settings", "(none)", rule, remedy)])
        for way in self.every:
            check_plan(self.task(way), paths)

    def task(self, way: Way) -> SamplingTask:
        """Return the task of a way of sampling.

        Raises:
            ConfigErrors: its settings do not fit, or it draws other samples.
        """
        task = self.make(way.overrides(type(self.plain.settings.sampling).model_fields))
        if problems := [*_other_samples(way, task, self.plain)]:
            raise ConfigErrors(problems)
        return task

    def count(self, way: Way) -> Count:
        """Count the forwards of a way of sampling."""
        steps = resolved(self.task(way), self.paths).steps
        return Count(steps.forwards, steps.whole, "?" in steps.letters)

    def add_floor(
        self,
        asked: str | None,
        rows: int,
        lengths: Mapping[str, int],
        mesh: jax.sharding.Mesh | None,
    ) -> None:
        """Add dense sampling with another kernel as the second way.

        Args:
            asked: a kernel; None for any other than the dense way's; "none" adds nothing.
            rows: batch rows of a model call.
            lengths: tokens of text and image.

        Raises:
            ConfigErrors: dense sampling has that kernel, or it cannot run.
        """
        if asked == "none":
            return
        task = self.task(self.every[0])
        ours = _self_kernel(task, rows, lengths, mesh)
        others: dict[str, str] = {}
        for kernel in (*((asked,) if asked else ()), *KERNELS.get(jax.default_backend(), ())):
            try:
                changed = with_attention(task, tuple(_keys_of(task, kernel).items()))
                others[kernel] = _self_kernel(changed, rows, lengths, mesh)
            except MaxattnError as error:
                if kernel == asked:
                    rule = error.problems[0].rule if isinstance(error, ConfigErrors) else error.rule
                    remedy = "name another kernel, or give --floor none"
                    raise ConfigErrors([ConfigError("--floor", kernel, rule, remedy)]) from None
        free = [kernel for kernel, theirs in others.items() if theirs != ours]
        if not free and asked is None:
            print(f"no floor: no other kernel than {ours} is known to run here (--floor)")
            return
        if not free or (asked and asked != free[0]):
            rule = f"it must differ from the kernel of dense sampling, {ours}"
            remedy = " or ".join(f"--floor {kernel}" for kernel in (*free, "none"))
            raise ConfigErrors([ConfigError("--floor", asked, rule, f"give {remedy}")])
        self.every.insert(1, Way(FLOOR, {**self._off, **_keys_of(task, free[0])}))

    def add_plain(self, way: Way, count: Count) -> tuple[str | None, str]:
        """Add plain sampling, in the fewest steps that cost no less, after a way with `fast`.

        Args:
            way: has run; nothing is added if another way is already that plain one.
            count: of the forwards that it computed.

        Returns:
            The name of the plain one or None, and why there is none or "".
        """
        sampling = self.task(way).settings.sampling
        if not any(getattr(sampling, key) for key in self._off):
            return None, ""
        number = sampling.num_inference_steps
        fewer = max(1, math.ceil(count.computed / count.whole * number - ROUNDED))
        try:
            plain = self._plain_of(way, fewer)
            while fewer < number and self.count(plain).computed < count.computed - ROUNDED:
                fewer += 1
                plain = self._plain_of(way, fewer)
            settings = self.task(plain).settings
        except ConfigErrors as error:
            return None, f"{fewer} plain steps cost as much, and {error.problems[0].rule}"
        others = [x for x in self.every if x.name == DENSE or PLAIN.match(x.name)]
        found = next((x for x in others if self.task(x).settings == settings), None)
        if found is None:
            free = chain([plain.name], (f"{plain.name} ({n})" for n in count_from(2)))
            names = {x.name for x in others}
            found = plain._replace(name=next(x for x in free if x not in names))
            self.every.insert(self.every.index(way) + 1, found)
        return found.name, ""

    def _plain_of(self, way: Way, fewer: int) -> Way:
        """Return a way without shortcuts, in fewer steps; a list is cut to as many values.

        Raises:
            ConfigErrors: its list has fewer values.
        """
        sampling = self.task(way).settings.sampling
        number, own = sampling.num_inference_steps, Given.of(sampling.__dict__)
        left_out = {"num_inference_steps", *(KEYS if own is not None else ())}
        kept = {key: x for key, x in sorted(way.changes.items()) if key.split(".")[0] not in FAST}
        said = {key: x for key, x in kept.items() if key not in left_out}
        if own is not None and sampling.distilled is None:  # a distilled model sets the list
            if fewer > number:
                rule = f"{own.setting} has {number} values"
                raise ConfigErrors([ConfigError(own.setting, number, rule, "give more of them")])
            said[own.key] = [own.values[i * number // fewer] for i in range(fewer)]
        told = [f"{key}={x}" for key, x in said.items() if key in kept]
        name = textwrap.shorten(", ".join([f"{fewer} plain steps", *told]), 60, placeholder=" ...")
        return Way(name, {**kept, **said, **self._off, "num_inference_steps": fewer})


def _read(path: Path | None, given: Sequence[Sequence[str]]) -> list[Way]:
    said: dict[str, Any] = {} if path is None else {str(x): y for x, y in _mapping(path).items()}
    problems = [problem for name in said for problem in _name_errors("--settings", name)]
    for name, *changes in given:
        problems += _name_errors("--setting", name)
        if name in said:
            rule = "each way of sampling has a name of its own, and two have this one"
            problems.append(ConfigError("--setting", name, rule, "give it another name"))
        said[name] = dict(map(_change, changes))
    if problems:
        raise ConfigErrors(problems)
    return [Way.of(name, x or {}) for name, x in said.items()]


def _name_errors(setting: str, name: str) -> Iterator[ConfigError]:
    meant = ", ".join(f"{key} is {what}" for key, what in TAKEN.items())
    rule = f"{meant}, and N plain steps are those of the same cost"
    if name in TAKEN or PLAIN.match(name):
        yield ConfigError(setting, name, rule, "give it another name")


def _change(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE.

    Raises:
        ConfigErrors: the text has another form, or the value is not YAML.
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
def _self_kernel(
    task: SamplingTask, rows: int, lengths: Mapping[str, int], mesh: jax.sharding.Mesh | None
) -> str:
    plans = task.plans(rows, lengths, sharding.program_mesh(mesh)).values()
    names = (plan.kernel.name for plan in plans if plan.call.role == "self")
    return ", ".join(dict.fromkeys(names))


def _keys_of(task: SamplingTask, kernel: str) -> dict[str, str | None]:
    """Return the settings that give a task's self-attention a kernel, and keep its strategy."""
    try:
        ma.AttentionConfig(attention_kernel=task.settings.attention)
    except ConfigErrors:  # other values of `attention` name a strategy too
        return {"attention_kernel": kernel}
    named = task.settings.attention_kernel is not None
    return {"attention": kernel, **({"attention_kernel": None} if named else {})}


def _other_samples(way: Way, task: SamplingTask, plain: SamplingTask) -> Iterator[ConfigError]:
    rule = "every way of sampling draws the same prompts from the same noise, in the same size"
    ours, theirs = task.settings.sampling, plain.settings.sampling
    keys = [key for key in DRAWN if getattr(ours, key, None) != getattr(theirs, key, None)]
    for key in keys:
        remedy = f"leave {key} out here; before --setting, sampling.{key}=VALUE is for all"
        yield ConfigError("--setting", f"{way.name}: {key}={getattr(ours, key)}", rule, remedy)
    devices = [key for key in vars(task.settings) if DEVICES.match(key)]
    for key in devices:
        if (value := getattr(task.settings, key)) != getattr(plain.settings, key):
            rule = "every way of sampling runs on the same devices, spread in the same way"
            remedy = f"leave {key} out here; before --setting, {key}=VALUE is for all"
            yield ConfigError("--setting", f"{way.name}: {key}={value}", rule, remedy)
    if (folder := task.settings.model.folder) != plain.settings.model.folder:
        rule = "every way of sampling has the weights of --model"
        remedy = "leave it out here, and run the command once for each model"
        yield ConfigError("--setting", f"{way.name}: model.folder={folder}", rule, remedy)
    if not keys and task.latents != plain.latents:
        sizes = f"latents {list(task.latents)}, and without it {list(plain.latents)}"
        remedy = "leave out the key that changes the size"
        yield ConfigError("--setting", f"{way.name}: {sizes}", rule, remedy)
