"""score_digits.py: a row for each way of sampling, fewer plain steps at equal cost beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from maxattn_examples.common.statistics import drift
from maxattn_examples.digits_large.drawing import Conditions, draw
from maxattn_examples.digits_large.task import ClipTask
from maxattn_examples.train.export import export
from score_digits import arguments_of, main, ways_of

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError

from .small import CONFIG, overrides, settings

CACHE = "{cache: {schedule: XX..}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights."""
    folder = tmp_path_factory.mktemp("model")
    task = ClipTask.of(settings(folder))
    export(task, task.build(None, nnx.Rngs(0)), folder)
    return folder


def found(folder: Path, out: Path, *more: str) -> Any:
    """Return the arguments of a run over eight clips, one a device, in four steps."""
    few = ["sampling.num_inference_steps=4", "model.dtype=float32"]
    told = ["--model", str(folder), "--clips", "8", "--batch", "8", "--out", str(out)]
    return arguments_of([str(CONFIG), *overrides(folder), *few, *told, *more])


@pytest.mark.slow
def test_a_run_writes_rows_that_agree(folder: Path, tmp_path: Path, capsys: Any):
    cached = ["--setting", "cache", f"fast={CACHE}"]
    main(found(folder, tmp_path, "--floor", "none", *cached, "--setting", "same"))
    said = json.loads((tmp_path / "scores.json").read_text())
    rows = {row["name"]: row for row in said["rows"]}
    assert list(rows) == ["real", "dense", "cache", "2 plain steps", "same"]
    counts = {name: (row.get("forwards"), row.get("of")) for name, row in rows.items()}
    assert counts["dense"] == (8, 8) and counts["cache"] == (4, 8)
    assert counts["2 plain steps"] == (4, 4) and counts["real"] == (None, None)
    assert rows["same"]["drift"] == 0 < rows["cache"]["drift"]
    of_clips = said["per_clip"]["cache"]["drift"]
    assert rows["cache"]["drift"] == pytest.approx(np.median(of_clips), abs=1e-5)
    pairs = {(x["name"], x["beside"], x["score"]): x for x in said["pairs"]}
    against = pairs["cache", "2 plain steps", "drift"]
    apart = np.subtract(of_clips, said["per_clip"]["2 plain steps"]["drift"])
    assert against["mean"] == pytest.approx(apart.mean(), abs=1e-5)
    assert (against["better"], against["worse"]) == ((apart < 0).sum(), (apart > 0).sum())
    assert pairs["same", "dense", "likelihood"]["p"] == 1
    text = (tmp_path / "scores.md").read_text()
    assert text.strip() in capsys.readouterr().out and "| cache | 4 of 8 |" in text
    assert (tmp_path / "clips.png").stat().st_size > 1000


def test_batches_change_no_clip(folder: Path, tmp_path: Path):
    _, make = ways_of(found(folder, tmp_path, "--floor", "none"))
    task: Any = make(())
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(4, *task.latents[1:], 3)).astype(np.float32)
    prompts = ["a red two leaving up", "a blue one bouncing left", "", "a pink six leaving down"]
    whole, halves = (draw(task, Conditions(prompts, noise, n)).clips for n in (4, 2))
    assert drift(whole, halves).max() < 1e-5 and drift(whole[1:], whole[:-1]).min() > 0.1


def test_every_way_is_read_before_one_is_drawn(folder: Path, tmp_path: Path):
    for more, said in (
        (["--setting", "x", "num_inference_step=3"], "num_inference_step"),
        (["--setting", "x", "fast={cache: {schedule: XX.}}"], "it has a letter for each of the 4"),
        (["--setting", "floor", "guidance_scale=1"], "give it another name"),
        (["--clips", "12"], "clips are drawn in whole batches of 8"),
        (["--clips", "4", "--batch", "4"], "the 8 devices of data and fsdp have as many clips"),
    ):
        with pytest.raises((ConfigError, ConfigErrors), match=said):
            ways_of(found(folder, tmp_path, "--floor", "none", *more))
