"""The command that measures curves: written with what they are of, and taken by the same run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import calibrate as command
import jax
import numpy as np
import pytest
import yaml
from maxattn_examples.compare import curve
from maxattn_examples.compare.thresholds import polynomial, smallest
from maxattn_examples.sample.command import arguments_of
from safetensors.numpy import load_file, save_file

from maxattn.config import ConfigErrors
from tests.examples.conftest import ROOT
from tests.examples.sample.pipelines import CONFIGS, EXACT, pipeline, prepared, run, sizes_of, told

STEPS = 9


def measured(folder: Path, options: list[str], *words: str) -> dict[str, Any]:
    """Run the command on a small Wan; return what it wrote."""
    file = folder / "curve.yml"
    given = [str(ROOT / "configs" / CONFIGS["wan"]), "model.sizes=null", *EXACT, *sizes_of("wan")]
    given += ["sampling.timestep_shift=null", "--model", str(folder), *options]
    given += [f"num_inference_steps={STEPS}", *words, "--curve", str(file)]
    command.main(arguments_of("", given, more=command.add_options))
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize("batched", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_curve_is_measured_and_taken_by_the_same_run(
    batched: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = prepared(tmp_path)
    found = measured(folder, options, f"guidance_batched={batched}")
    ratios = np.array(found["ratios"])
    assert ratios.shape == (STEPS, 2) and (ratios[0] == 1).all() and (ratios > 0).all()
    assert found["sampler"] == "unipc" and found["shift"] == 3.0 and found["experts"] == 1
    assert found["sizes"]["num_layers"] == 2 and len(found["checkpoint"]) == 16
    printed = capsys.readouterr().out
    assert "| threshold | most | computed" in printed
    take = f"fast.cache.magcache.ratios={folder / 'curve.yml'}"
    words = (*options, f"num_inference_steps={STEPS}", take, "fast.cache.magcache.threshold=9")
    run(folder, "wan", *words)
    assert "forwards are computed" in capsys.readouterr().out
    with pytest.raises(ConfigErrors, match="it was measured with this sampler"):
        run(folder, "wan", *words, "sampler=flow_euler")


def test_what_a_share_of_the_steps_needs_is_found_and_taken(tmp_path: Path, capsys: Any) -> None:
    folder, options = prepared(tmp_path)
    batched = "guidance_batched=false"
    found = measured(folder, options, batched, "num_inference_steps=12", "--share", "0.6")
    file, caches = folder / "curve.yml", ("magcache", "teacache", "first_block", "easycache")
    assert set(found["schedules"]) == set(caches) and found["share"] == 0.6
    words = (*options, batched, "num_inference_steps=12")
    capsys.readouterr()
    for kind in caches:
        letters = found["schedules"][kind]
        assert letters.count("X") <= 7 and len(letters) == 12
        run(folder, "wan", *words, f"fast.cache.{kind}.calibrated={file}")
        printed = capsys.readouterr().out
        assert f"{kind}, threshold {found[kind]['threshold']:g})" in printed
        if kind in ("magcache", "teacache"):
            assert f"schedule {letters} (" in printed
        else:  # a run is the dense one until its first step that reuses
            said = re.search(r"computed \d+ of 12 steps(?: with the text)?: (\S+)", printed)
            same = letters.index(".") + 1
            assert said is not None and said[1][:same] == letters[:same]
    own = f"fast.cache.first_block={{calibrated: {file}, threshold: 0}}"
    run(folder, "wan", *words, own)
    assert "all 12 steps are computed: first_block, threshold 0" in capsys.readouterr().out
    for bad, why in (("--share=0", "above 0"), ("--share=1.5", "above 0"), ("--plan", "nothing")):
        with pytest.raises(ConfigErrors, match=why):
            measured(folder, options, bad)
    check_refused(folder, words, file)


def check_refused(folder: Path, words: tuple[str, ...], file: Path) -> None:
    """Check that thresholds of another run are refused."""
    takes = f"fast.cache.easycache.calibrated={file}"
    text, less = file.read_text(), file.with_name("less.yml")
    said = yaml.safe_load(text.replace("blocks: 1", "blocks: -1"))
    less.write_text(yaml.safe_dump({key: x for key, x in said.items() if key != "easycache"}))
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    for more, why in (
        ((takes, "num_inference_steps=10"), "measured in 12 steps, and the run has 10"),
        ((takes, "sampler=flow_euler"), "measured with this sampler, and the run has flow_euler"),
        ((f"fast.cache.easycache.calibrated={less}",), "it has no section easycache"),
        ((f"fast.cache.first_block.calibrated={less}",), "less.yml: first_block.blocks -1"),
        (("fast.cache.teacache.threshold=1",), "name a file of examples/calibrate.py"),
        (
            (f"fast.cache.teacache={{calibrated: {file}, input: modulation}}",),
            "the polynomial of .* was measured with input embedding",
        ),
        ((f"fast.cache.first_block={{calibrated: {file}, blocks: 2}}",), "or set threshold too"),
    ):
        with pytest.raises(ConfigErrors, match=why):
            run(folder, "wan", *words, *more)
    tensors = load_file(weights)
    save_file({name: x + 1 for name, x in tensors.items()}, weights)
    with pytest.raises(ConfigErrors, match="it was measured on these weights") as refused:
        run(folder, "wan", *words, takes)
    assert "sampling.fast.cache.easycache.calibrated" in str(refused.value)


def test_a_polynomial_is_fitted_to_changes_from_step_to_step() -> None:
    want = (-40.0, 20.0, -3.0, 0.5, 0.01)
    changes = np.random.default_rng(0).uniform(0.05, 0.3, 20)
    states = np.cumprod([1.0, *(1 + changes)])[:, None] * np.ones(3)
    predictions = np.cumprod([1.0, *(1 + np.polyval(want, changes))])[:, None]
    dense = curve.Dense(np.ones((21, 1)), [range(21)], {}, [], [*predictions], [states])
    found = polynomial(dense)
    assert found is not None
    np.testing.assert_allclose(found, want, rtol=1e-6)
    assert polynomial(dense._replace(times=None)) is None


def test_the_smallest_threshold_is_rounded_up_and_suffices() -> None:
    at = [0.013579, 0.0271, 0.3, 5.0]  # from which a step reuses

    def letters(threshold: float) -> list[str]:
        return ["".join("." if threshold > x else "X" for x in at)]

    for share, n in ((0.75, 0), (0.5, 1), (0.3, 2), (0.0, 3)):
        found = smallest(letters, share)
        assert found is not None and at[n] < found <= at[n] * 1.003
    assert smallest(lambda _: ["XX.."], 0.4) is None


WITHOUT = [
    (9, "0.05", "at most a share of 0.05 of the 9 steps", "--share, such as 0.5"),
    (4, "0.5", "4 steps were measured", "num_inference_steps=8 or more"),
]


@pytest.mark.parametrize(("steps", "share", "why", "remedy"), WITHOUT)
def test_a_file_without_caches_says_why(
    steps: int, share: str, why: str, remedy: str, tmp_path: Path, capsys: Any
) -> None:
    _, options = told(tmp_path, "wan")
    folder, options = pipeline(tmp_path, "wan", "unipc"), [*options, f"num_inference_steps={steps}"]
    found = measured(folder, [], *options, f"num_inference_steps={steps}", "--share", share)
    said = capsys.readouterr().out.split("no settings of ")[1]
    assert len(found["left_out"]) == 4 and why in said and remedy in said
    with pytest.raises(ConfigErrors, match=why):
        run(folder, "wan", *options, f"fast.cache.magcache.calibrated={folder / 'curve.yml'}")


def test_ratios_are_means_over_tokens_and_clips() -> None:
    ours, before = jax.random.normal(jax.random.key(0), (2, 2, 5, 3))
    wide = [np.linalg.norm(np.asarray(x, np.float64), axis=-1) for x in (ours, before)]
    got = curve._ratio(ours, before)
    np.testing.assert_allclose(got, (wide[0] / wide[1]).mean(), rtol=1e-6)
    both = curve._wanted(3, 2, np.arange(6))
    assert both.tolist() == [0, 1, 3, 4], "the rows of samples that fill up the devices are left"
