"""Files of curves, which were measured once on a model: read, and refused for another run.

A curve is of weights, a sampler, its shift and a number of steps. A file says of which, and what it
does not say is not checked, with two exceptions: a file with the hash of one transformer is not of
two, and without `lora` it is of a run without LoRA weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml
from jaxtyping import Float

from maxattn.config import ConfigErrors, Section
from maxattn.errors import ConfigError

from .coefficients import Ratio, Ratios
from .run_weights import RunWeights

ANOTHER = "give one that was measured so, or write a schedule (sampling.fast.cache.schedule)"
LeftOut = Literal["steps", "share", "times"]


class CurveFile(Section):
    """A curve, and what it was measured on."""

    kind: Literal["magcache"] = "magcache"
    """What it is for."""
    ratios: Ratios
    """Of each step: |what the layers added| over that of the step before, the first one 1."""
    sampler: str | None = None
    """The sampler's name: unipc, flow_euler, euler or ddim."""
    shift: float | None = None
    """Of its times."""
    sizes: Mapping[str, int] | None = None
    """Some of the model's sizes, such as num_layers."""
    embedded_guidance: float | None = None
    """The guidance that is an input of the model, as of FLUX.1-dev."""
    experts: int | None = None
    """How many transformers the pipeline has."""
    checkpoint: str | None = None
    """Hash of the weights, as `checkpoint_hash` computes it."""
    checkpoint_2: str | None = None
    """The same of the second of two transformers."""
    lora: tuple[str, ...] = ()
    """LoRA weights that were merged: the transformer, the hash and the scale of each."""
    source: str | None = None
    """Where it was read or measured."""
    machine: str | None = None
    """What it was measured on."""
    date: str | None = None
    """When."""
    share: float | None = None
    """Of the steps that compute with the settings below, at most."""
    magcache: Mapping[str, Any] | None = None
    """Settings of sampling.fast.cache.magcache, beside the ratios."""
    teacache: Mapping[str, Any] | None = None
    """Settings of sampling.fast.cache.teacache."""
    first_block: Mapping[str, Any] | None = None
    """Settings of sampling.fast.cache.first_block."""
    easycache: Mapping[str, Any] | None = None
    """Settings of sampling.fast.cache.easycache."""
    left_out: Mapping[str, LeftOut] | None = None
    """Caches without settings, and why: the steps, the share, or the model's embedding of times."""
    schedules: Mapping[str, str] | None = None
    """What the settings give; of caches that decide in each step, what they are expected to."""


class Facts(NamedTuple):
    """What a curve is of: the facts of a run.

    Args:
        sampler: its name.
        shift: of its times; None where it has none.
        sizes: of the model.
        weights: of all its transformers.
        experts: transformers of the pipeline.
        embedded_guidance: that is an input of the model.
        states: gives those of the times of each transformer's steps, of a kind; None if what
            modulates the model is not of the time alone.
    """

    sampler: str | None = None
    shift: float | None = None
    sizes: Mapping[str, Any] = {}
    weights: RunWeights | None = None
    experts: int = 1
    embedded_guidance: float | None = None
    states: Callable[[Any], Sequence[Float[np.ndarray, "n d"]] | None] | None = None


def ratios_of(
    given: str | tuple[Ratio, ...], steps: int, facts: Facts, interpolate: bool
) -> Float[np.ndarray, "n b"]:
    """Return the ratios of each step of a run, a column for each prediction.

    Args:
        given: a file, or ratios.
        steps: of the run.
        facts: of the run.
        interpolate: whether a curve of another number of steps is taken at its nearest steps.

    Raises:
        ConfigErrors: the file cannot be read, or is of another run.
    """
    setting, where = "sampling.fast.cache.magcache.ratios", f"{len(given)} ratios"
    if isinstance(given, str):
        file, where = read_curve(setting, given), given
        if problems := list(differences(file, facts, setting, given)):
            raise ConfigErrors(problems)
        given = file.ratios
    curve = np.array([x if isinstance(x, tuple) else (x, x) for x in given], np.float64)
    if len(curve) == steps:
        return curve
    if not interpolate:
        rule = f"it is a curve of {len(curve)} steps, and the run has {steps}"
        remedy = (
            f"set num_inference_steps={len(curve)}, measure one for {steps} steps, or set"
            " sampling.fast.cache.magcache.interpolate=true"
        )
        raise ConfigError(setting, where, rule, remedy)
    # The first and the last step of one are those of the other.
    places = np.round(np.linspace(0, len(curve) - 1, steps)) if steps > 1 else [len(curve) - 1]
    return curve[np.asarray(places, int)]


def read_curve(setting: str, name: str) -> CurveFile:
    """Read a curve's file.

    Args:
        setting: that names it.
        name: its path.

    Raises:
        ConfigError: it cannot be read.
        ConfigErrors: keys or values of it are wrong.
    """
    if not Path(name).is_file():
        rule = "it names the YAML file of a curve, and there is none"
        remedy = "name one, such as configs/curves/magcache_wan_2_1_t2v_1_3b.yml"
        raise ConfigError(setting, name, rule, remedy)
    try:
        said = yaml.safe_load(Path(name).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        rule, remedy = f"it is YAML, and reading it failed: {error}", "write it anew"
        raise ConfigError(setting, name, rule, remedy) from None
    if not isinstance(said, dict) or not all(isinstance(key, str) for key in said):
        rule = "it has a mapping, with the key ratios"
        raise ConfigError(setting, name, rule, "write `ratios: [1, 0.99, ...]`")
    try:
        return CurveFile(**said)
    except ConfigErrors as errors:
        found = ((f"{name}: {x.setting} {x.value}", x.rule, x.remedy) for x in errors.problems)
        raise ConfigErrors([ConfigError(setting, *each) for each in found]) from None


def differences(file: CurveFile, facts: Facts, setting: str, name: str) -> Iterator[ConfigError]:
    """Yield what a curve was measured on that the run is not; of another model that alone."""
    remedy, value = ANOTHER, f"{name}: {{}}"
    sizes = {**(file.sizes or {}), **({"experts": file.experts} if file.experts else {})}
    if (problem := size_error(sizes, facts, setting, name)) is not None:
        yield problem
        return
    if file.sampler not in (None, facts.sampler):
        rule = f"it was measured with this sampler, and the run has {facts.sampler}"
        yield ConfigError(setting, value.format(f"sampler {file.sampler}"), rule, remedy)
    if file.shift is not None and (facts.shift is None or abs(file.shift - facts.shift) > 1e-6):
        shown = "none" if facts.shift is None else f"{facts.shift:g}"
        rule = f"it was measured with this shift of times, and the run has {shown}"
        yield ConfigError(setting, value.format(f"shift {file.shift:g}"), rule, remedy)
    if file.embedded_guidance not in (None, facts.embedded_guidance):
        rule = f"the model was told this guidance, and in the run {facts.embedded_guidance}"
        told = f"embedded_guidance {file.embedded_guidance:g}"
        yield ConfigError(setting, value.format(told), rule, remedy)
    if file.checkpoint is not None and facts.weights is not None:
        yield from _weights_errors(file, facts.weights, setting, name)


def _weights_errors(
    file: CurveFile, weights: RunWeights, setting: str, name: str
) -> Iterator[ConfigError]:
    """Yield transformers and LoRA weights of a curve that are not the run's."""
    anew = "measure it anew with examples/calibrate.py and the weights of this run"
    for each in weights.apart(file.__dict__):
        if each.was is None:
            rule = f"the run has a {each.what}, and the file has no hash of it"
            yield ConfigError(setting, f"{name}: no {each.key}", rule, anew)
            continue
        where = weights.parts.get(each.what, f"a {each.what}")
        theirs = f"those of {where} are {each.found}" if each.found else f"{where} has none"
        rule = f"it was measured on these weights, and {theirs}"
        is_away = each.what in weights.parts and each.found is None
        remedy = "put the weights there" if is_away else ANOTHER
        yield ConfigError(setting, f"{name}: {each.key} {each.was}", rule, remedy)
    ours, theirs = weights.lora_said(), list(file.lora)
    if ours != theirs:
        rule = f"it was measured with this LoRA, and the run has {_listed(ours)}"
        remedy = f"{anew}, which are those of --model, --lora and --lora-scale"
        yield ConfigError(setting, f"{name}: lora {_listed(theirs)}", rule, remedy)


def _listed(lora: Sequence[str]) -> str:
    return ", ".join(lora) or "none"


def size_error(
    sizes: Mapping[str, int], facts: Facts, setting: str, name: str
) -> ConfigError | None:
    """Return the problem that the run's model has other sizes; None if it has these.

    Args:
        sizes: of the model that something was measured on.
        facts: of the run.
        setting: that names it.
        name: its own.
    """
    found = {**facts.sizes, "experts": facts.experts}
    other = [key for key, size in sizes.items() if found.get(key) != size]
    if not other:
        return None
    theirs, ours = (_sizes_said({key: x.get(key) for key in other}) for x in (sizes, found))
    rule = f"it was measured on a model of this size, and this one has {ours}"
    return ConfigError(setting, f"{name}: {theirs}", rule, ANOTHER)


def _sizes_said(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"no {key}" if x is None else f"{key} {x}" for key, x in sizes.items())
