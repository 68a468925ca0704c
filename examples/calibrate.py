"""Measure on your own model what step caches are computed from, and write it as YAML.

    python examples/calibrate.py configs/wan_1_3b.yml --model FOLDER --embeddings FILE \\
        --share 0.5 --curve out/curve.yml
    # then one of
    python examples/generate.py wan configs/wan_1_3b.yml --model FOLDER --prompt ... --out DIR \\
        sampling.fast.cache.magcache.calibrated=out/curve.yml
    # teacache.calibrated=, first_block.calibrated=, easycache.calibrated=

It runs dense sampling twice on the prompts, and writes how what the layers add changes from step to
step; for each cache the smallest threshold with which a share of the steps computes, at most, and
its schedule; TeaCache's polynomial of this model; with the hashes of the weights (LoRA too), the
sampler, the shift of its times, the machine and the date: a run that differs in one of the first
three refuses the file. Schedules of MagCache and TeaCache are exact. Those of the first-block cache
and EasyCache, which decide in each step, are expected from the dense run's numbers; the run prints
what it computed. examples/drift.py measures what each of them costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from maxattn_examples.common import hosts
from maxattn_examples.common.markdown import table
from maxattn_examples.common.replacing import replacing
from maxattn_examples.common.writable import unwritable
from maxattn_examples.compare.curve import Ratios, measure
from maxattn_examples.compare.family import family_of, task_of_family
from maxattn_examples.compare.report import machine_facts
from maxattn_examples.compare.thresholds import Found, find, left_out
from maxattn_examples.fast.cache_settings import MagCacheSettings
from maxattn_examples.fast.calibrated import lacking
from maxattn_examples.fast.curves import LeftOut
from maxattn_examples.fast.schedules import FEW, magcache
from maxattn_examples.sample.checks import check
from maxattn_examples.sample.command import check_unread, command, paths_of
from maxattn_examples.sample.paths import Paths
from maxattn_examples.sample.planned import shift_of
from maxattn_examples.sample.run import check_weights, start_of
from maxattn_examples.sample.run_weights import weights_of_run
from maxattn_examples.sample.runner import Runner
from maxattn_examples.sample.task import SamplingTask

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError

THRESHOLDS = ((0.06, 2), (0.12, 2), (0.12, 4), (0.24, 6))  # and steps that reuse in a row
DIGITS = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add = parser.add_argument_group("what is measured").add_argument
    told = "where the curve is written, as YAML"
    add("--curve", type=Path, default=Path("out/curve.yml"), metavar="FILE", help=told)
    told = "of the steps that compute, at most: thresholds are the smallest that do with so many"
    add("--share", type=float, default=0.5, metavar="X", help=told)


def facts_of(task: SamplingTask, paths: Paths, experts: int) -> dict[str, object]:
    """Return what a curve is of."""
    sampler, sizes = task.sampler(), vars(task.sizes)
    weights = weights_of_run(task, paths)
    names = ("num_layers", "num_single_layers", "num_attention_heads", "in_channels")
    known = {name: sizes[name] for name in names if isinstance(sizes.get(name), int)}
    return {
        "kind": "magcache",
        "source": "examples/calibrate.py",
        "sampler": sampler.name,
        "shift": shift_of(sampler),
        "embedded_guidance": task.embedded_guidance,
        "sizes": known,
        "experts": experts,
        **weights.checkpoints(),
        "lora": weights.lora_said(),
        **{key: value for key, value in machine_facts().items() if key != "versions"},
    }


def schedules(found: Ratios) -> str:
    """Return a table of the schedules that thresholds give."""
    rows = []
    for threshold, most in THRESHOLDS:
        how = MagCacheSettings(ratios=(1.0,), threshold=threshold, most=most)
        letters = magcache(found, how)
        rows.append(
            [f"{threshold:g}", f"{most}", f"{letters.count('X')} of {len(letters)}", letters]
        )
    return table(("threshold", "most", "computed", "schedule"), rows)


def settings_of(found: Mapping[str, Found], share: float) -> dict[str, Any]:
    """Return the settings of each cache, and its schedule, as the file has them."""
    schedules = {kind: each.letters[0] for kind, each in found.items()}
    return {
        "share": share,
        **{kind: each.settings for kind, each in found.items()},
        "schedules": schedules,
    }


def thresholds(found: Mapping[str, Found], share: float) -> str:
    """Return a table of the settings that compute a share of the steps, at most."""
    rows = []
    for kind, (settings, letters) in found.items():
        computed = sum(x.count("X") for x in letters), sum(map(len, letters))
        said = "before the run" if kind in ("magcache", "teacache") else "expected"
        rows.append(
            [kind, f"{settings['threshold']:g}", "{} of {}".format(*computed), said, letters[0]]
        )
    heads = ("cache", "threshold", "computed", "known", f"schedule for {share:.0%} of the steps")
    return table(heads, rows)


def lacking_lines(without: Mapping[str, LeftOut], steps: int, share: float) -> list[str]:
    """Say which caches have no settings in the file, why, and what would give them some."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for kind, why in without.items():
        kinds.setdefault(lacking(steps, share, why), []).append(kind)
    return [f"no settings of {', '.join(x)}: {rule}; {do}" for (rule, do), x in kinds.items()]


def main(found: argparse.Namespace) -> None:
    """Measure, write and print."""
    make_task, settings = task_of_family(family_of(found))
    task_settings = settings(found, ["sampling.fast=null"])
    paths = paths_of(found, task_settings.model.folder)
    hosts.alone("a calibration")
    check_unread(found, "out", "latents", "plan")
    task = make_task(task_settings, paths.model)
    if (problem := unwritable("--curve", found.curve)) is not None:
        raise ConfigErrors([problem])
    if not 0 < found.share <= 1:
        rule = "it is a share of the steps: above 0, and 1 at most"
        raise ConfigErrors([ConfigError("--share", found.share, rule, "use one such as 0.5")])
    if task.layers == 1:
        rule = "a curve is of layers that add to what they take, as a transformer's do"
        remedy = "set sampling.fast.cache.interval, which needs no curve"
        raise ConfigErrors([ConfigError("--model", paths.model, rule, remedy)])
    check(task, paths, writes=False)
    check_weights(task, paths)
    mesh = task.settings.make_mesh()
    runner = Runner(task, paths, start_of(task, paths, mesh), mesh)
    dense = measure(runner)
    curve = np.round(dense.ratios, DIGITS)
    few = len(curve) < FEW  # where caches are refused
    best = {} if few else find(dense._replace(ratios=curve), found.share)
    without = left_out(dense, best)
    rows = [row if len(row) > 1 else row[0] for row in curve.tolist()]
    facts = facts_of(task, paths, len(runner.steps.experts))
    found.curve.parent.mkdir(parents=True, exist_ok=True)
    with replacing(found.curve) as partial:
        said = {**facts, "ratios": rows, **settings_of(best, found.share), "left_out": without}
        text = yaml.safe_dump(said, sort_keys=False, default_flow_style=None)
        partial.write_text(text, "utf-8")
    tables = [schedules(curve), *([thresholds(best, found.share)] if best else [])]
    print("", *tables, *lacking_lines(without, len(curve), found.share), found.curve, sep="\n")


if __name__ == "__main__":
    command(__doc__, "wan", main, add_options)
