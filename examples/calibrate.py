"""Measure MagCache's curve of your own model of Wan or Flux.1, and write it as YAML.

    python examples/calibrate.py wan configs/wan_1_3b.yml --model FOLDER --embeddings FILE \\
        --curve out/curve.yml
    # then, in sampling with the same steps
    python examples/generate.py wan configs/wan_1_3b.yml --model FOLDER --prompt ... --out DIR \\
        sampling.fast.cache.magcache.ratios=out/curve.yml

It runs dense sampling once on the prompts. The file has the facts that the curve depends on: the
hashes of all weights, LoRA too, the sampler and its shift, the guidance, the size and the dtype. A
run that differs in one of them refuses it. The command prints the schedules that thresholds give.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml
from maxattn_examples.common import hosts
from maxattn_examples.common.command import user_errors
from maxattn_examples.compare.report import machine_facts, table
from maxattn_examples.compare.runner import Clips, Runner, curve_of
from maxattn_examples.compare.ways import opened
from maxattn_examples.sample.check import check
from maxattn_examples.sample.command import check_unread
from maxattn_examples.sample.resolve import curve_facts

from maxattn import steps
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.tools.writable import check_writable
from maxattn.weights.replacing import replacing

THRESHOLDS = ((0.06, 2), (0.12, 2), (0.12, 4), (0.24, 6))  # and steps that reuse in a row


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    told = "where the curve is written, as YAML"
    add = parser.add_argument_group("what is measured").add_argument
    add("--curve", type=Path, default=Path("out/curve.yml"), metavar="FILE", help=told)


def schedules(ratios: tuple, counts: list[int], layers: int) -> str:
    """Return a table with the schedule that each threshold gives."""
    rows = []
    for threshold, most in THRESHOLDS:
        how = {"ratios": ratios, "threshold": threshold, "most": most}
        try:
            settings = steps.StepSettings.model_validate({"cache": {"magcache": how}})
            letters = steps.resolve(settings, counts, layers).letters
        except ConfigError:
            letters = "X" * sum(counts)
        count = f"{letters.count('X')} of {len(letters)}"
        rows.append([f"{threshold:g}", f"{most}", count, letters])
    return table(("threshold", "most", "computed", "schedule"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the curve, write it, and print the schedules."""
    found, make, paths = opened(__doc__, arguments, add_options)
    hosts.alone("a calibration")
    check_unread(found, "out", "latents", "plan")
    task = make(["sampling.fast=null"])
    check_writable("--curve", found.curve)
    if task.layers == 1:
        rule = "a curve needs residual layers, such as a transformer's"
        remedy = "set sampling.fast.cache.interval, which needs no curve"
        raise ConfigErrors([ConfigError("--model", paths.model, rule, remedy)])
    check(task, paths, writes=False)
    runner = Runner(task, paths, Clips.of_prompts(task, paths), task.settings.make_mesh())
    curve = [row if len(row) > 1 else row[0] for row in np.round(curve_of(runner), 5).tolist()]
    facts = curve_facts(task, runner.resolved.sampler, paths)
    found.curve.parent.mkdir(parents=True, exist_ok=True)
    with replacing(found.curve) as partial:
        said = {**facts, **machine_facts(), "ratios": curve}
        partial.write_text(yaml.safe_dump(said, sort_keys=False), "utf-8")
    ratios = tuple(tuple(x) if isinstance(x, list) else x for x in curve)
    counts = [x.steps for x in runner.resolved.experts]
    print(f"\n{schedules(ratios, counts, task.layers)}\n{found.curve}")


if __name__ == "__main__":
    with user_errors():
        main()
