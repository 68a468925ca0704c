"""The command that measures what shortcuts cost: its figures are those of the runs themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import drift as command
import numpy as np
import pytest
import yaml
from maxattn_examples.compare import pictures
from maxattn_examples.sample.command import arguments_of

from maxattn.config import ConfigErrors
from tests.examples.conftest import ROOT
from tests.examples.sample.pipelines import CONFIGS, EXACT, prepared, run, sizes_of


def measured(folder: Path, name: str, options: list[str], *words: str) -> dict[str, Any]:
    """Run the command on a pipeline of fixtures; return what it wrote."""
    report = folder / "drift.yml"
    given = [str(ROOT / "configs" / CONFIGS[name]), "model.sizes=null", *EXACT, *sizes_of(name)]
    given += ["sampling.timestep_shift=null", "--model", str(folder), *options]
    found = arguments_of("", [*given, "--report", str(report), *words], more=command.add_options)
    command.main(found)
    return yaml.safe_load(report.read_text())


def test_drift_is_of_whole_runs_and_of_single_steps(tmp_path: Path, capsys: Any) -> None:
    folder, options = prepared(tmp_path)
    words = ["--setting", "all", "fast={cache: {schedule: XXXX}}"]
    words += ["--setting", "late", "fast={cache: {schedule: XXX.}}"]
    words += ["--setting", "early", "fast.cache.schedule=X..X", "--steps", "4"]
    found = measured(folder, "wan", options, *words)
    rows = {row["name"]: row for row in found["rows"]}
    plain = ["late", "3 plain steps", "early", "2 plain steps"]
    assert list(rows) == ["dense", "floor", "all", *plain] and rows["all"]["same_cost"] == "dense"
    assert rows["all"]["drift"] == [0.0] and rows["all"]["step_error"] == [0.0]
    assert rows["late"]["forwards"] == [6, 8] and rows["early"]["forwards"] == [4, 8]
    assert 0 < rows["floor"]["drift"][0] < 1e-3 < rows["late"]["drift"][0]
    assert rows["late"]["same_cost"] == "3 plain steps"
    assert rows["3 plain steps"]["forwards"] == [6, 6], "changes come after options"
    dense = run(folder, "wan", *options)
    for name, how in (("late", "XXX."), ("early", "X..X")):
        ours = run(folder, "wan", *options, f"fast.cache.schedule={how}")
        apart = np.linalg.norm(ours - dense) / np.linalg.norm(dense)
        np.testing.assert_allclose(rows[name]["drift"], [apart], rtol=1e-3)
    # Of the steps that reuse, not of the three that compute.
    assert rows["late"]["step_error"][0] > 1e-3 and len(found["checkpoint"]) == 16
    assert rows["floor"]["step_error"][0] < 1e-3 and "checkpoint_2" not in found
    printed = capsys.readouterr().out
    assert "| late " in printed and "of the final latents, median of the clips" in printed


WAYS = """--floor none num_inference_steps=12
--setting first fast.cache.first_block.threshold=0.6
--setting list fast.cache.schedule=XX.. sampler=flow_euler warped=true
timesteps=[1000,800,600,400] num_inference_steps=4
--setting distilled fast.cache.interval=2 distilled=causvid guidance_scale=1 num_inference_steps=9
--setting shift timestep_shift=8
--setting unguided guidance_scale=1"""  # the last one fills up the devices with other rows


def test_a_way_is_compared_at_the_cost_that_it_had(tmp_path: Path, capsys: Any) -> None:
    folder, options = prepared(tmp_path)
    found = measured(folder, "wan", options, *WAYS.split())
    rows = {row["name"]: row for row in found["rows"]}
    printed = capsys.readouterr().out
    (first,) = (int(x) for x in re.findall(r"computed (\d+) of 12 steps: X", printed))
    assert 1 < first < 12 and rows["first"]["forwards"] == [12 + first, 24], "of two layers"
    plain = rows[rows["first"]["same_cost"]]["forwards"]
    assert abs(plain[0] - rows["first"]["forwards"][0]) <= 1 and plain[0] == plain[1]
    thin = "2 plain steps, sampler=flow_euler, warped=True, ..."
    assert rows["list"]["same_cost"] == thin and rows[thin]["forwards"] == [4, 4]
    assert "5 plain steps cost as much, and causvid is of 9 steps" in printed
    assert "list: no error of a step: the sampler is flow_euler, and the" in printed
    assert "shift: no error of a step: the times of the steps are not" in printed
    assert rows["unguided"]["step_error"][0] > 0.1 and "same_cost" not in rows["unguided"]


@pytest.mark.parametrize("name", ["wan_a14b", "wan_ti2v", "flux"])
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
        (("x", "seed=2020-01-01"), "seed"),
        (("x", "ici_context_parallelism=2"), "x: ici_context_parallelism=2"),
        (("x", "model.folder=PATH/transformer"), "run the command once for each model"),
        (("x", "--floor", "flash", "attention=flash"), "give --floor dot_product or --floor none"),
        (("x", "--floor", "flsh"), "--floor: flsh"),
        (("x", "--latents", "x.safetensors"), "this command does nothing with it"),
        (("x", "--report", "/proc/nope/x.yml"), "nothing can be written in /proc"),
    ],
)
def test_a_way_that_is_no_other_way_of_the_same_samples_is_refused(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    folder, options = prepared(tmp_path)
    given = (word.replace("PATH", str(tmp_path)) for word in words)
    with pytest.raises(ConfigErrors, match=re.escape(says)):
        measured(folder, "wan", options, "--setting", *given)
    assert not (tmp_path / "drift.yml").exists()


def test_no_known_model_and_nothing_to_compare_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match="says which model it is"):
        measured(tmp_path, "wan", [], "--setting", "a", "num_inference_steps=2")
    folder, options = prepared(tmp_path)
    with pytest.raises(ConfigErrors, match="a way of sampling is compared with the dense one"):
        measured(folder, "wan", options)


def test_scores_of_pictures() -> None:
    numbers = np.random.default_rng(0)
    smooth = np.linspace(0, 200, 32)[:, None, None] + np.zeros((32, 40, 3))
    noisy = smooth + numbers.normal(0, 8, (2, *smooth.shape))
    one, other = noisy.clip(0, 255).astype(np.uint8)
    error = np.square(one.astype(float) - other).mean()
    assert pictures.psnr(one, other) == pytest.approx(20 * np.log10(255) - 10 * np.log10(error))
    assert pictures.ssim(one, one) == pytest.approx(1.0)
    assert 0.1 < pictures.ssim(one, other) < pictures.ssim(one, smooth.astype(np.uint8)) < 1
