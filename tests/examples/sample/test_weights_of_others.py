"""Weights of another pipeline are refused before any is read; messages: golden/generate.txt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxattn.errors import ConfigError
from tests.fixtures import make_pipelines as runs
from tests.golden_text import check_golden

from .pipelines import draw, pipeline, sizes_of, told

# The pipeline that is sampled, the one that the weights are of, and the folder that is named.
GIVEN = {
    "of_two_for_one": ("wan", "wan_a14b", "other"),
    "of_one_for_two": ("wan_a14b", "wan", "other"),
    "of_flux": ("wan", "flux", "other"),
    "of_a_flux_transformer": ("wan", "flux", "other/transformer"),
}


def made(folder: Path, name: str) -> None:
    """Make a small pipeline, with an index that names its class."""
    pipeline(folder, name, next(iter(runs.SCHEDULERS[name])))
    kind = {"_class_name": "FluxPipeline" if name == "flux" else "WanPipeline"}
    (folder / "model_index.json").write_text(json.dumps(kind | runs.INDEX.get(name, {})))


@pytest.mark.parametrize("case", GIVEN)
def test_weights_of_another_pipeline_are_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, given, weights = GIVEN[case]
    told(tmp_path, name)
    made(tmp_path / "model", name)
    made(tmp_path / "other", given)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sample.run.load", lambda *_: pytest.fail("weights were read"))
    files = ("--embeddings", "told.safetensors", "--latents", "out.safetensors")
    with pytest.raises(ConfigError) as error:
        draw(name, "--model", "model", *sizes_of(name), *files, "--weights", weights)
    check_golden(f"generate/weights_{case}", str(error.value))
