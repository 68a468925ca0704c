"""The command that compares ways of sampling: its figures equal those of separate runs."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import compare as command
import numpy as np
import pytest
import yaml
from flax import nnx
from maxattn_examples.compare import drift, scores
from maxattn_examples.digits.task import ClipTask
from maxattn_examples.train.checkpoint import export

from maxattn.config import ConfigErrors
from maxattn.errors import InputError, MaxattnError
from tests.examples.conftest import ROOT
from tests.examples.digits.small import CONFIG, overrides, settings
from tests.examples.sample.pipelines import CONFIGS, EXACT, prepared, run, sizes_of
from tests.waiting import but


def measured(folder: Path, name: str, options: list[str], *words: str) -> dict[str, Any]:
    """Run the command on a pipeline of fixtures; return the written report."""
    report = folder / "drift.yml"
    given = [str(ROOT / "configs" / CONFIGS[name]), "model.sizes=null", *EXACT, *sizes_of(name)]
    given += ["sampling.timestep_shift=null", "--model", str(folder), *options]
    command.main([*given, "--report", str(report), *words])
    return yaml.safe_load(report.read_text())


def test_drift_is_of_whole_runs_and_of_single_steps(tmp_path: Path, capsys: Any) -> None:
    folder, options = prepared(tmp_path)
    words = ["--setting", "all", "fast={cache: {schedule: XXXX}}"]
    words += ["--setting", "late", "fast.cache.schedule=XXX.", "--steps", "4"]
    found = measured(folder, "wan", options, *words)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["dense", "floor", "all", "late", "3 plain steps"]
    assert rows["all"]["same_cost"] == "dense"
    assert rows["all"]["drift"] == [0.0] and rows["all"]["step_error"] == [0.0]
    assert rows["late"]["forwards"] == [6, 8]
    assert 0 < rows["floor"]["drift"][0] < 1e-3 < rows["late"]["drift"][0]
    assert rows["late"]["same_cost"] == "3 plain steps"
    assert rows["3 plain steps"]["forwards"] == [6, 6], "changes come after options"
    dense = run(folder, "wan", *options)
    apart = np.linalg.norm(run(folder, "wan", *options, words[-3]) - dense) / np.linalg.norm(dense)
    np.testing.assert_allclose(rows["late"]["drift"], [apart], rtol=1e-3)
    # Of the steps that reuse, not of the three that compute.
    assert rows["late"]["step_error"][0] > 1e-3 and len(found["checkpoint"]) == 16
    assert rows["floor"]["step_error"][0] < 1e-3 and "checkpoint_2" not in found
    printed = capsys.readouterr().out
    assert "| late " in printed and "of the final samples, median of the clips" in printed
    assert "| late | 3 plain steps, 6 forwards | drift |" in printed


WAYS = """--floor none num_inference_steps=12
--setting first fast.cache.first_block.threshold=0.6
--setting list fast.cache.schedule=XX.. sampler=flow_euler warped=true
timesteps=[1000,800,600,400] num_inference_steps=4
--setting distilled fast.cache.interval=2 distilled=causvid guidance_scale=1 num_inference_steps=9
--setting shift timestep_shift=8
--setting unguided guidance_scale=1"""  # the last one fills up the devices with other rows


def test_a_way_is_compared_at_no_less_than_its_cost(tmp_path: Path, capsys: Any) -> None:
    folder, options = prepared(tmp_path)
    found = measured(folder, "wan", options, *WAYS.split())
    rows = {row["name"]: row for row in found["rows"]}
    printed = capsys.readouterr().out
    (first,) = (int(x) for x in re.findall(r"computed (\d+) of 12 steps: X", printed))
    assert 1 < first < 12 and rows["first"]["forwards"] == [12 + first, 24], "of two layers"
    plain = rows[rows["first"]["same_cost"]]["forwards"]
    assert 0 <= plain[0] - rows["first"]["forwards"][0] < 2 and plain[0] == plain[1]
    thin = "2 plain steps, sampler=flow_euler, warped=True, ..."
    assert rows["list"]["same_cost"] == thin and rows[thin]["forwards"] == [4, 4]
    assert "5 plain steps cost as much, and causvid is of 9 steps" in printed
    assert "list: no error of a step: the sampler is flow_euler, and the" in printed
    assert "shift: no error of a step: the times of the steps are not" in printed
    assert rows["unguided"]["step_error"][0] > 0.1 and "same_cost" not in rows["unguided"]


@pytest.mark.parametrize("name", but(["wan_a14b", "wan_ti2v", "flux"], ["wan_a14b", "flux"]))
def test_a_row_has_the_facts_that_its_drift_depends_on(name: str, tmp_path: Path) -> None:
    (folder, options), late = prepared(tmp_path, name), "fast.cache.schedule=X.X."
    found = measured(folder, name, options, "--floor", "none", "--setting", "late", late)
    of = found["rows"][1]["of"]
    assert {"guidance", "dtype", "attention", "latents", "samples", "lora"} <= set(of)
    assert ("checkpoint_2" in of) == (name == "wan_a14b") and of["checkpoint"]
    if name == "wan_ti2v":  # whose first frame is the one that was given
        ours, dense = (run(folder, name, *options, *more) for more in ((late,), ()))
        apart = np.linalg.norm(ours - dense) / np.linalg.norm(dense)
        np.testing.assert_allclose(found["rows"][1]["drift"], [apart], rtol=1e-3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("dense", "fast={preset: fast}"), "dense is sampling without shortcuts"),
        (("floor", "attention=flash"), "give it another name"),
        (("as configured", "guidance_scale=1"), "the config's own sampling.fast"),
        (("3 plain steps", "fast={preset: fast}"), "N plain steps are those of the same cost"),
        (("x", "seed=5"), "x: seed=5"),
        (("x", "sampling.height=64"), "x: height=64"),
        (("x", "frames=13"), "leave frames out here; before --setting, sampling.frames=VALUE"),
        (("x", "fast={preset: "), "the value of a key is YAML, and reading it failed"),
        (("x", "fast={cache: {schedule: XX.}}"), "it has a letter for each of the 4"),
        (("x", "num_inference_step=3"), "num_inference_step"),
        (("x", "seed=2020-01-01"), "seed"),
        (("x", "ici_context_parallelism=2"), "x: ici_context_parallelism=2"),
        (("x", "model.folder=PATH/transformer"), "run the command once for each model"),
        (("x", "--floor", "flash", "attention=flash"), "give --floor dot_product or --floor none"),
        (("x", "--floor", "flsh"), "--floor: flsh"),
        (("x", "--latents", "x.safetensors"), "this command does nothing with it"),
        (("x", "--report", "/proc/nope/x.yml"), "nothing can be written in /proc"),
        (("x", "--clips", "2"), "the judge scores the model that configs/digits_large.yml trains"),
        (("x", "--batch", "2"), "the clips, 1, are drawn in whole batches, of 2"),
        ((), "there is no way of sampling to compare with the dense one"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: tuple[str, ...], says: str, tmp_path: Path):
    folder, options = prepared(tmp_path)
    given = (word.replace("PATH", str(tmp_path)) for word in words)
    with pytest.raises(MaxattnError, match=re.escape(says)):
        measured(folder, "wan", options, *(["--setting", *given] if words else []))
    assert not (tmp_path / "drift.yml").exists()


# ---- digits that are judged ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights of the digits model."""
    folder = tmp_path_factory.mktemp("model")
    task = ClipTask.of(settings(folder))
    export(task, task.build(None, nnx.Rngs(0)), folder)
    return folder


def judged(folder: Path, out: Path, *more: str) -> dict[str, Any]:
    """Run the command on eight clips, in two padded batches."""
    few = ["sampling.num_inference_steps=4", "model.dtype=float32", "--model", str(folder)]
    told = ["--clips", "8", "--batch", "4", "--floor", "none", "--report", str(out)]
    command.main(["wan", str(CONFIG), *overrides(folder), *few, *told, *more])
    return yaml.safe_load(out.read_text())


@pytest.mark.slow
def test_clips_of_digits_are_judged_in_batches(digits: Path, tmp_path: Path, capsys: Any) -> None:
    cached = ["--setting", "cache", "fast={cache: {schedule: XX..}}"]
    said = judged(digits, tmp_path / "a.yml", *cached, "--setting", "same")
    rows = {row["name"]: row for row in said["rows"]}
    assert list(rows) == ["real", "dense", "cache", "2 plain steps", "same"]
    counts = [rows[name].get("forwards") for name in rows]
    assert counts == [None, [8, 8], [4, 8], [4, 4], [8, 8]] and len(said["prompts"]) == 8
    assert max(rows["same"]["drift"]) == 0 < min(rows["cache"]["drift"])
    pairs = {(x["name"], x["beside"], x["score"]): x for x in said["pairs"]}
    against = pairs["cache", "2 plain steps", "drift"]
    apart = np.subtract(rows["cache"]["drift"], rows["2 plain steps"]["drift"])
    assert against["mean"] == pytest.approx(apart.mean(), abs=1e-5)
    assert (against["better"], against["worse"]) == ((apart < 0).sum(), (apart > 0).sum())
    assert pairs["same", "dense", "likelihood"]["p"] == 1 and ("real", "dense", "path") not in pairs
    assert len(rows["real"]["identity"]) == 8 and rows["dense"]["FD to dense"] < 1e-6
    printed = capsys.readouterr().out
    assert "| cache | 4 of 8 |" in printed and "p cannot be below 0.0078" in printed
    whole = judged(digits, tmp_path / "b.yml", *cached, "--batch", "8")["rows"][2]
    np.testing.assert_allclose(whole["drift"], rows["cache"]["drift"], rtol=1e-3)


def test_clips_are_drawn_in_whole_batches(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"of 3\n.*give --batch 2"):
        judged(digits, tmp_path / "a.yml", "--batch", "3")


# ---- for any program -----------------------------------------------------------------------------


def test_drift_takes_callables_of_any_program(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=(6, 3, 2))
    sizes: list[int] = []

    def near(x: np.ndarray) -> np.ndarray:
        sizes.append(len(x))
        return 1.1 * x

    ways = {"near": near, "far": lambda x: 1.3 * x}
    floor = lambda x: 1.01 * x  # noqa: E731
    report = drift(lambda x: x, ways, noise, floor, same_cost={"near": "far"}, batch=4)
    assert sizes == [4, 2] and report.floor == pytest.approx(0.01)
    text = str(report)
    assert "| near | 0.1000 | 0.1000 | 10.0 |" in text and "p cannot be below 0.031" in text
    assert "| near | far | drift | -0.2000 | 6 / 0 | 0.031 |" in text
    found = yaml.safe_load(report.write(tmp_path / "new" / "drift.yml").read_text())
    assert [row["name"] for row in found["rows"]] == ["dense", "floor", "near", "far"]
    assert found["pairs"][0]["better"] == 6 and found["clips"] == 6
    with pytest.raises(InputError, match="use names of ways: near, far"):
        drift(lambda x: x, ways, noise, same_cost={"near": "fra"})
    with pytest.raises(InputError, match="dense and floor name other rows"):
        drift(lambda x: x, {"dense": near}, noise)
    with pytest.raises(InputError, match="return the final samples alone"):
        drift(lambda x: x, {"a": lambda x: x[:1]}, noise)


def test_the_example_of_drift_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestFinder().find(drift, "drift", globs={})
    assert examples[0].examples and doctest.DocTestRunner().run(examples[0]).failed == 0


def test_scores_of_pictures() -> None:
    numbers = np.random.default_rng(0)
    smooth = np.linspace(0, 200, 32)[:, None, None] + np.zeros((32, 40, 3))
    noisy = smooth + numbers.normal(0, 8, (2, *smooth.shape))
    one, other = noisy.clip(0, 255).astype(np.uint8)
    error = np.square(one.astype(float) - other).mean()
    assert scores.psnr(one, other) == pytest.approx(20 * np.log10(255) - 10 * np.log10(error))
    assert scores.ssim(one, one) == pytest.approx(1.0)
    assert 0.1 < scores.ssim(one, other) < scores.ssim(one, smooth.astype(np.uint8)) < 1
