"""Compare ways of sampling Wan, SDXL or Flux.1 on your own model, prompts and machine.

    python examples/compare.py wan configs/wan_1_3b.yml --model FOLDER --embeddings FILE \\
        --setting balanced "fast={preset: balanced}" --setting half num_inference_steps=25 \\
        --report out/compare.yml
    # digits, which a judge scores: 64 prompts, and ways of sampling from a file
    python examples/compare.py wan configs/digits_large.yml --model out/digits_large \\
        --settings configs/scores/digits_large.yml --clips 64

The family may be left out if the file names its models. Every way of sampling draws the same
prompts from the same noise. Its row has the number of forwards, the seconds without compiling, the
distance of its samples from the dense ones (also as a multiple of the floor, which is dense
sampling with another attention kernel), and the error of single steps that reuse or approximate.
Each way with a section `fast` is followed by plain sampling in the fewest steps that cost no less,
and a test compares both clip by clip. With --out DIR the samples are decoded into a folder for each
way, which adds PSNR, SSIM and, if the package lpips is installed, LPIPS.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from maxattn_examples.common import hosts
from maxattn_examples.common.command import user_errors
from maxattn_examples.compare.report import Report, machine_facts
from maxattn_examples.compare.runner import Clips, compare, rows_of
from maxattn_examples.compare.scores import Scores, batch_of
from maxattn_examples.compare.ways import Ways, opened
from maxattn_examples.sample.check import check
from maxattn_examples.sample.command import check_unread
from maxattn_examples.sample.resolve import weights_facts
from maxattn_examples.sample.run import start_of_plan

from maxattn.tools.writable import check_writable


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add = parser.add_argument_group("what is compared").add_argument
    add("--settings", type=Path, metavar="FILE", help="YAML: keys of sampling by name")
    told = "one more way of sampling: a name, then KEY=VALUE"
    add("--setting", nargs="+", action="append", default=[], metavar="NAME", help=told)
    told = "another kernel of attention than the config's, for the floor; or none"
    add("--floor", metavar="KERNEL", help=told)
    told = "where the rows are written, as YAML"
    add("--report", type=Path, default=Path("out/compare.yml"), metavar="FILE", help=told)
    told = "clips that are drawn at once; default all of yours, 8 of --clips"
    add("--batch", type=int, metavar="N", help=told)
    told = "prompts of digits, scored by a judge: of the model that configs/digits_large.yml trains"
    add("--clips", type=int, metavar="N", help=told)
    told = "number of the first of --clips: thresholds are chosen on others than these"
    add("--first", type=int, metavar="N", help=told)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every way of sampling, and write the report after each."""
    found, make, paths = opened(__doc__, arguments, add_options)
    hosts.alone("a comparison")
    check_unread(found, "latents")
    check_writable("--report", found.report)
    ways = Ways(make, paths, found.settings, found.setting, alone=found.clips is not None)
    plain, mesh = ways.plain, ways.plain.settings.make_mesh()
    begins = start_of_plan(plain, paths, mesh)
    batch = batch_of(found, plain, begins.rows.wanted)
    if not found.plan and found.clips is None:
        check(plain, paths, writes=False)
    rows = rows_of(plain, batch, mesh)
    ways.add_floor(found.floor, rows.samples * rows.calls, begins.lengths, mesh)
    if found.plan:
        print(*(f"{way.name}: {ways.count(way)}" for way in ways.every), sep="\n")
        return
    scores = Scores(plain, paths, found.clips, found.first or 0)
    clips = scores.clips(batch) or Clips.of_prompts(plain, paths, batch)
    facts = {"config": str(found.config), **weights_facts(plain, paths), **machine_facts()}
    report = Report({**facts, "clips": len(clips.noise), "batch": batch, **scores.facts})
    report.rows, report.words = scores.rows, scores.words
    for _ in compare(ways, clips, scores.add, report, mesh):
        report.write(found.report)
    print(f"\n{report}\n{found.report}")


if __name__ == "__main__":
    with user_errors(), hosts.first_speaks():
        main()
