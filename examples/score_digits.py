"""Score ways of sampling on the model of several digits, clip by clip.

    python examples/score_digits.py configs/digits_large.yml --model out/digits_large \\
        --settings configs/scores/digits_large.yml --out out/scores
    # one more, by name
    python examples/score_digits.py configs/digits_large.yml --model out/digits_large \\
        --setting half num_inference_steps=25

Every way of sampling draws the same prompts from the same noise. Its row says how many forwards are
computed and how long that took, without compiling. A way with a section `fast` gets a row of plain
sampling in fewer steps beside it, which computes as many forwards. Real clips, of handwriting that
no model saw, have a row of their own. Drift is how far samples end from the dense ones, in
multiples of the floor: the same sampling with another kernel of attention.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from maxattn_examples.common import hosts
from maxattn_examples.common.command import parser_of, user_errors
from maxattn_examples.compare import ways as arms
from maxattn_examples.compare.ways import Arm, self_kernel
from maxattn_examples.digits_large import clips, scenes
from maxattn_examples.digits_large.drawing import Conditions, draw, rows_of
from maxattn_examples.digits_large.report import REAL, Report
from maxattn_examples.digits_large.sampling_task import ClipSamplingTask, size_of_clips
from maxattn_examples.digits_large.scenes import Scans, Scene, Size
from maxattn_examples.digits_large.scores import Judge
from maxattn_examples.digits_large.settings import Settings
from maxattn_examples.sample.files import Paths
from maxattn_examples.sample.rows import Rows, assumed_lengths, batch_ways, noise

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError

SEED = 1_000_003  # of prompts and noise; training counts its clips from another one


def arguments_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add = arms.add_options(parser)
    add("--clips", type=int, default=64, metavar="N", help="prompts, each with noise of its own")
    told = "number of the first clip: thresholds are chosen on others than these"
    add("--first", type=int, default=0, metavar="N", help=told)
    add("--batch", type=int, default=8, metavar="N", help="clips that are drawn at once")
    add("--out", type=Path, default=Path("out/scores"), metavar="DIR", help="scores.json, ...")
    return parser.parse_intermixed_args(arguments)


def ways_of(found: argparse.Namespace) -> tuple[list[Arm], arms.MakeTask]:
    """Read every way of sampling before the first is drawn: the dense one and the floor first.

    Raises:
        ConfigErrors: settings of one do not fit, or the clips are no whole batches.
    """
    if found.model is None:
        rule, remedy = "weights to draw with are in a folder", "give the folder of a training run"
        raise ConfigErrors([ConfigError("--model", "null", rule, remedy)])
    if found.clips < 2 or found.clips % found.batch:
        rule = f"clips are drawn in whole batches of {found.batch}"
        remedy = f"use {max(1, found.clips // found.batch) * found.batch}, or another --batch"
        raise ConfigErrors([ConfigError("--clips", found.clips, rule, remedy)])
    folder, common = Path(found.model), [*found.overrides, f"model.folder={found.model}"]

    def make(changes: Sequence[str]) -> ClipSamplingTask:
        settings = Settings.from_yaml(found.config, [*common, *changes])
        return ClipSamplingTask.of(settings, folder)

    plain = make(())
    mesh = plain.settings.make_mesh()
    if found.batch % (ways := batch_ways(mesh)):
        rule = f"the {ways} devices of data and fsdp have as many clips each"
        raise ConfigErrors([ConfigError("--batch", found.batch, rule, f"use a multiple of {ways}")])
    said = arms.read_arms(found.settings, found.setting, {**arms.TAKEN, REAL: "real clips"})
    for arm in said:
        arms.forwards(arms.task_of(arm, make), Paths(folder))  # or refuse its settings
    rows = rows_of(plain, found.batch, mesh)
    sizes = {"rows": rows.samples * rows.calls, "lengths": assumed_lengths(plain), "mesh": mesh}
    return arms.with_floor(said, found.floor, make, partial(self_kernel, **sizes)), make


def scene_of(first: int, count: int, size: Size, scans: Scans) -> tuple[Scene, Any]:
    """Draw scenes that no model saw; return them, and the real clips."""
    scene = scenes.draw(SEED, jnp.arange(first, first + count), scans, size)
    return scene, clips.render(scene, clips.scans_here(scans), size)


def main(found: argparse.Namespace) -> None:
    """Draw and score every way of sampling; write what is known after each."""
    hosts.alone("a comparison")
    ways, make = ways_of(found)
    plain: Any = make(())
    size, held_out = size_of_clips(plain.settings, plain.sizes), Scans.of("test")
    scene, real = scene_of(found.first, found.clips, size, held_out)
    judge = Judge(size)
    print(f"classifier: {judge.accuracy:.1%} of scans that it did not learn from")
    report = Report(judge, scene, found.out)
    others, other_clips = scene_of(2**20 + found.first, found.clips, size, held_out)
    report.add_real(real, other_clips, others)
    rows = Rows(found.first + found.clips, 1, 1, 1)
    start = noise(SEED, rows, (*plain.latents[1:], plain.latents[0]))[found.first :]
    told = Conditions(scene.prompts(), start, found.batch)
    for arm in ways:  # which grow
        task: Any = arms.task_of(arm, make)
        count = arms.forwards(task, Paths(task.folder))
        print(f"\n{arm.name}: {count}")
        drawn = draw(task, told, task.settings.make_mesh())
        count = count._replace(computed=drawn.forwards, at_most=False)
        named, lacks = arms.add_plain(ways, arm, count, make)
        if lacks:
            print(f"no row of the same cost: {lacks}")
        report.add(named, count, drawn)
        report.write()
    print(f"\n{report.text()}")
    print("\n".join(map(str, report.write())))


if __name__ == "__main__":
    with user_errors(), hosts.first_speaks():
        main(arguments_of())
