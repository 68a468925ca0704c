"""A run that stops being finite ends at that step, and says in which part of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxattn.errors import InputError

from .pipelines import pipeline, run, told


def broken(path: Path, key: str, which: str) -> tuple[Path, list[Any]]:
    """Write a pipeline some of whose weights are not finite."""
    _, options = told(path, "wan")
    folder = pipeline(path, "wan", "unipc")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    if key:
        save_file(weights | {key: np.full_like(weights[key], np.nan)}, file)
    return folder, [*options, which]


BOTH, ALONE = "guidance_batched=true", "fast.guidance.stop=0.5"
CACHED = "fast.cache.schedule=XX.X"
# The weights, how the run is, and the first part that is not finite.
FIRST = [
    *(("blocks.0.ffn.net.2.bias", which, "the output of layer 0") for which in (BOTH, ALONE)),
    *(("blocks.1.ffn.net.2.bias", which, "the output of layer 1") for which in (BOTH, ALONE)),
    ("patch_embedding.bias", BOTH, "the input of layer 0"),
    ("condition_embedder.time_embedder.linear_1.bias", BOTH, "the embedding of the time"),
    ("condition_embedder.text_embedder.linear_1.bias", BOTH, "what the model makes of the prompt"),
    ("proj_out.weight", CACHED, "the model's output, after its last layer,"),
    ("", "guidance_scale=3.0e+38", "the (mix of the predictions|sum of the sampler) is the first"),
]


@pytest.mark.parametrize(("key", "which", "part"), FIRST)
def test_the_first_part_is_named(key: str, which: str, part: str, tmp_path: Path) -> None:
    folder, options = broken(tmp_path, key, which)
    with pytest.raises(InputError) as error:
        run(folder, "wan", *options)
    assert re.match(f"not finite after step \\d of 4: {part}", str(error.value.value))
    assert ("look at" if key else "lower the guidance scale") in error.value.remedy
