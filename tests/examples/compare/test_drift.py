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
from tests.examples.sample.pipelines import CONFIGS, EXACT, draw, prepared, run, sizes_of


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
--setting easy sampling.fast.cache.easycache.threshold=0.5 fast.cache.easycache.first=2
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
    easy, first = (int(x) for x in re.findall(r"computed (\d+) of 12 steps: X", printed))
    assert 2 < easy < 12 and rows["easy"]["forwards"] == [2 * easy, 24]
    assert 1 < first < 12 and rows["first"]["forwards"] == [12 + first, 24], "of two layers"
    for name in ("easy", "first"):
        plain = rows[rows[name]["same_cost"]]["forwards"]
        assert abs(plain[0] - rows[name]["forwards"][0]) <= 1 and plain[0] == plain[1]
    thin = "2 plain steps, sampler=flow_euler, warped=True, ..."
    assert rows["list"]["same_cost"] == thin and rows[thin]["forwards"] == [4, 4]
    assert "5 plain steps cost as much, and causvid is of 9 steps" in printed
    assert "list: no error of a step: the sampler is flow_euler, and the" in printed
    assert "shift: no error of a step: the times of the steps are not" in printed
    assert rows["unguided"]["step_error"][0] > 0.1 and "same_cost" not in rows["unguided"]


def test_a_run_names_the_row_that_is_its_own(tmp_path: Path, capsys: Any) -> None:
    folder, options = prepared(tmp_path)
    options.append("num_inference_steps=8")
    late = "fast={cache: {interval: 3}}"
    found = measured(folder, "wan", options, "--setting", "late", late)
    report, row = str(folder / "drift.yml"), found["rows"][2]
    capsys.readouterr()

    def said(*words: str, name: str = report) -> str:
        run(folder, "wan", *options, f"fast.measured={name}", *words)
        return capsys.readouterr().out

    printed = said("fast.cache.schedule=X..X..X.")
    drift = [x["drift"][0] for x in found["rows"][2:]]
    ours, plain = (f"drift {x:.4f}, {x / found['floor']:.1f} x the floor" for x in drift)
    assert f"on this checkpoint: {ours}\n" in printed
    assert f"3 plain steps, of the same cost: {plain}; {row['against']}" in printed
    made = f"1 samples, {found['machine']}, {found['date']}"
    assert f"row late of {report}: {made}" in printed
    printed = said("fast.guidance.zero_star=true")
    assert "late, and differs in fast\n" in printed and ", CFG-Zero*\n" in printed
    printed = said("fast.cache.interval=2", "--guidance", "3")
    assert "late, and differs in guidance, fast\n" in printed
    assert "drift" not in said("fast.cache.schedule=XXXXXXXX")
    assert "late, and differs in lora\n" in said(
        "fast.cache.interval=3", "--lora", str(tmp_path / "none.safetensors"), "--plan"
    )
    other = tmp_path / "other.yml"

    def changed(changes: dict[str, Any]) -> str:
        other.write_text(yaml.safe_dump(found | changes))
        return said("fast.cache.interval=3", name=str(other))

    unlike = f"not measured on this checkpoint, {found['checkpoint']}: {other} is of 0000"
    assert unlike in changed({"checkpoint": "0" * 16})
    unlike = f"{other} is of second transformer 1111111111111111, and no such weights"
    assert unlike in changed({"checkpoint_2": "1" * 16})
    bad: list[Any] = [{"rows": [row | {"drift": [x]}]} for x in (float("nan"), -1.0, True)]
    for worse in ({"rows": [{"name": "late"}]}, {"floor": -1.0}, {"floor": "x"}, *bad):
        with pytest.raises(ConfigErrors, match="a report has a checkpoint, rows with name, of"):
            changed(worse)


@pytest.mark.parametrize(
    ("name", "of", "others"),
    [
        ("wan_a14b", {"guidance": [4.0, 3.0], "guidance_batched": True},
         "guidance_scale_2=2 guidance_batched=false model.dtype=bfloat16 attention=flash"),
        ("wan_ti2v", {"guidance": 4.0}, "guidance_scale=2"),
        ("flux", {"embedded_guidance": 4.0}, "guidance_scale=2"),
    ],
)  # fmt: skip
def test_a_row_is_of_what_changes_numbers(
    name: str, of: dict[str, Any], others: str, tmp_path: Path, capsys: Any
) -> None:
    (folder, options), late = prepared(tmp_path, name), "fast.cache.schedule=X.X."
    found = measured(folder, name, options, "--floor", "none", "--setting", "late", late)
    assert of.items() <= found["rows"][1]["of"].items()
    if name == "wan_ti2v":  # whose first frame is the one that was given
        ours, dense = (run(folder, name, *options, *more) for more in ((late,), ()))
        apart = np.linalg.norm(ours - dense) / np.linalg.norm(dense)
        np.testing.assert_allclose(found["rows"][1]["drift"], [apart], rtol=1e-3)
    words = (*EXACT, *sizes_of(name), f"fast.measured={folder / 'drift.yml'}", late)
    keys = (*of, *("dtype", "attention"))
    for key, other in zip(keys, others.split(" "), strict=False):
        draw(name, "--model", folder, "--plan", "--embeddings", options[1], *words, other)
        assert f"late, and differs in {key}\n" in capsys.readouterr().out
    if name == "wan_a14b":
        for file in folder.glob("transformer*/*.safetensors"):
            file.unlink()
        options = ["--prompt", "a fox"]  # and no weights
        measured(folder, name, options, "--plan", "--setting", "late", late, "guidance_scale_2=1")
        assert "late: 3 of 6 forwards\n" in capsys.readouterr().out


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
        (("x", "--report", "/proc/nope/x.yml"), "in /proc nothing can be written"),
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
