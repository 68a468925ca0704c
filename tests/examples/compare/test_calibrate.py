"""The command that measures curves: its file has the facts, and the same run accepts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibrate as command
import jax
import numpy as np
import pytest
import yaml
from maxattn_examples.compare import runner

from maxattn.config import ConfigErrors
from tests.examples.conftest import ROOT
from tests.examples.sample.pipelines import CONFIGS, EXACT, prepared, run, sizes_of

STEPS = 9


def measured(folder: Path, options: list[str], *words: str) -> dict[str, Any]:
    """Run the command on a small Wan; return the written file."""
    file = folder / "curve.yml"
    given = [str(ROOT / "configs" / CONFIGS["wan"]), "model.sizes=null", *EXACT, *sizes_of("wan")]
    given += ["sampling.timestep_shift=null", "--model", str(folder), *options]
    given += [f"num_inference_steps={STEPS}", *words, "--curve", str(file)]
    command.main(given)
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize("batched", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_curve_is_measured_and_taken_by_the_same_run(batched: str, tmp_path: Path, capsys):
    folder, options = prepared(tmp_path)
    found = measured(folder, options, f"guidance_batched={batched}")
    ratios = np.array(found["ratios"])
    assert ratios.shape == (STEPS, 2) and (ratios[0] == 1).all() and (ratios > 0).all()
    assert found["sampler"] == "unipc" and found["shift"] == 3.0 and found["experts"] == 1
    assert found["num_layers"] == 2 and len(found["checkpoint"]) == 16
    printed = capsys.readouterr().out
    assert "| threshold | most | computed" in printed
    take = f"fast.cache.magcache.ratios={folder / 'curve.yml'}"
    words = (*options, f"num_inference_steps={STEPS}", take, "fast.cache.magcache.threshold=9")
    run(folder, "wan", *words)
    assert "forwards are computed" in capsys.readouterr().out
    with pytest.raises(ConfigErrors, match="measured with this sampler"):
        run(folder, "wan", *words, "sampler=flow_euler")


def test_ratios_are_means_over_tokens_and_clips() -> None:
    ours, before = jax.random.normal(jax.random.key(0), (2, 2, 5, 3))
    wide = [np.linalg.norm(np.asarray(x, np.float64), axis=-1) for x in (ours, before)]
    got = runner._ratio(ours, before)
    np.testing.assert_allclose(got, (wide[0] / wide[1]).mean(), rtol=1e-6)
