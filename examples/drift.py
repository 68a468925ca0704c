"""Measure what shortcuts of sampling cost on your own model, prompts and machine.

    python examples/drift.py configs/wan_1_3b.yml --model FOLDER --embeddings FILE \\
        --setting balanced "fast={preset: balanced}" --setting half num_inference_steps=25 \\
        --report out/drift.yml
    # a file of ways, by name
    python examples/drift.py configs/wan_1_3b.yml --model FOLDER --embeddings FILE \\
        --settings configs/scores/digits_large.yml --report out/drift.yml

Every way of sampling draws the same prompts from the same noise. Its row says how many forwards are
computed and how long they took, without compiling; how far its samples end from the dense ones, in
multiples of the floor too, which is dense sampling with another kernel of attention; and the error
of single steps that reuse or approximate, from the dense run's samples. Behind a way with a section
`fast` comes plain sampling of as many forwards as that way computed, if no row is that. With
--out DIR the samples are decoded into a folder for each way, and PSNR, SSIM (and LPIPS, where the
package lpips is there) are of their pictures.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from maxattn_examples.common import hosts
from maxattn_examples.common.statistics import drift
from maxattn_examples.compare import pictures
from maxattn_examples.compare import ways as arms
from maxattn_examples.compare.family import family_of, task_of_family
from maxattn_examples.compare.report import Report, Row, machine_facts
from maxattn_examples.compare.runner import Runner, Trajectory, psnr
from maxattn_examples.compare.ways import DENSE, PLAIN, Arm, self_kernel
from maxattn_examples.sample.check import check, check_plan
from maxattn_examples.sample.command import check_unread, command, paths_of
from maxattn_examples.sample.facts import run_facts, weights_facts
from maxattn_examples.sample.files import Paths
from maxattn_examples.sample.run import start_of, start_of_plan
from maxattn_examples.sample.task import SamplingTask

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.tools.writable import unwritable

CONFIGURED = "as configured"
LONGEST = 60  # characters of a folder's name, which may have 255 bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add = arms.add_options(parser)
    told = "where the rows are written, as YAML"
    add("--report", type=Path, default=Path("out/drift.yml"), metavar="FILE", help=told)


def ways_of(found: argparse.Namespace, make: arms.MakeTask, paths: Paths) -> list[Arm]:
    """Return the ways of sampling that are compared, the dense one first.

    Raises:
        ConfigErrors: there is nothing to compare with the dense one, or a way draws other samples,
            or its settings do not fit.
    """
    taken = {**arms.TAKEN, CONFIGURED: "the config's own sampling.fast"}
    said = arms.read_arms(found.settings, found.setting, taken)
    fast = make(()).settings.sampling.fast
    if fast is not None:
        whole = fast.model_dump(mode="json", exclude_unset=True)
        said.append(Arm(CONFIGURED, {"fast": whole}))
    if len(said) == 1:
        rule = "a way of sampling is compared with the dense one"
        remedy = "give --settings FILE or --setting NAME KEY=VALUE, or write sampling.fast"
        raise ConfigErrors([ConfigError("--settings", "(none)", rule, remedy)])
    for arm in said:
        arms.forwards(arms.task_of(arm, make), paths)  # or refuse its settings
    return said


def main(found: argparse.Namespace) -> None:
    """Run every way of sampling, and write what is known after each."""
    make_task, settings = task_of_family(family_of(found))
    paths = paths_of(found, settings(found, ()).model.folder)
    hosts.alone("a comparison")
    check_unread(found, "latents")

    def make(changes: Sequence[str]) -> SamplingTask:
        return make_task(settings(found, changes), paths.model)

    if (problem := unwritable("--report", found.report)) is not None:
        raise ConfigErrors([problem])
    ways = ways_of(found, make, paths)
    plain = arms.task_of(ways[0], make)
    mesh = plain.settings.make_mesh()
    if found.plan:
        check_plan(plain, paths)
    else:
        check(plain, paths, writes=False)
    begins = start_of_plan(plain, paths, mesh)
    rows = begins.rows.samples * begins.rows.calls
    name = partial(self_kernel, rows=rows, lengths=begins.lengths, mesh=mesh)
    ways = arms.with_floor(ways, found.floor, make, name)
    if found.plan:
        for arm in ways:
            print(f"{arm.name}: {arms.forwards(arms.task_of(arm, make), paths)}")
        return
    facts = {"config": str(found.config), **weights_facts(plain, paths)}
    report = Report({**facts, **machine_facts(), "clips": 0})
    dense: tuple[np.ndarray, Trajectory] | None = None
    decoded: list[np.ndarray] = []
    for arm in ways:  # which grow
        task = arms.task_of(arm, make)
        count = arms.forwards(task, paths)
        print(f"\n{arm.name}: {count}")
        runner = Runner(task, paths, start_of(task, paths, mesh), mesh)
        row, latents, dense = _measured(arm, count, runner, dense)
        row.arm, lacks = arms.add_plain(ways, arm, row.count, make)
        row.notes += [f"no row of the same cost: {lacks}"] if lacks else []
        row.of = run_facts(task, runner.resolved.sampler, paths)
        if paths.out is not None:
            shown = _shown(task, paths, latents, f"{len(report.rows):02} {arm.name}")
            decoded = decoded or shown
            row.pictures = {} if shown is decoded else pictures.scores(shown, decoded)
        report.facts = {**report.facts, "clips": len(dense[0])}
        report.rows.append(row)
        report.write(found.report)
    print(f"\n{report.text()}\n{found.report}")


def _shown(task: SamplingTask, paths: Paths, latents: np.ndarray, name: str) -> list[np.ndarray]:
    """Decode samples, and write what they show into a folder of their way of sampling."""
    assert paths.out is not None, "it was given"
    shown = task.pixels(paths.model, np.moveaxis(latents, -1, 1))
    folder = re.sub(r"[^\w.=-]+", "_", name)[:LONGEST]
    print(*task.write(shown, paths.out / folder), sep="\n")
    return shown


def _measured(
    arm: Arm, count: arms.Count, runner: Runner, dense: tuple[np.ndarray, Trajectory] | None
) -> tuple[Row, np.ndarray, tuple[np.ndarray, Trajectory]]:
    """Run a way of sampling; the first one is the dense run that others are held against."""
    if dense is None:
        run, kept = runner.dense()
        dense = run.latents, kept
    else:
        run = runner.run()
    for line in runner.walk.outcome():
        print(line)
    count = count._replace(computed=run.forwards, at_most=False)
    at_end = drift(run.latents, dense[0]), psnr(run.latents, dense[0])
    row = Row(arm, count, run.seconds, *at_end)
    if (unlike := runner.unlike(dense[1])) is not None:
        row.notes += [] if PLAIN.match(arm.name) else [f"no error of a step: {unlike}"]
    elif arm.name != DENSE:
        errors = np.stack(runner.errors(dense[1]))
        row.steps = np.median(errors[runner.approximate()], axis=0)
    return row, run.latents, dense


if __name__ == "__main__":
    command(__doc__, "wan", main, add_options)
