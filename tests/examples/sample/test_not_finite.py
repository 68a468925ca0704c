"""A run whose sample is not finite ends at that step, and names the part of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxattn.errors import InputError
from tests.waiting import but

from .pipelines import prepared, run


def broken(path: Path, key: str, which: str) -> tuple[Path, list[Any]]:
    """Write a pipeline in which some weights are not finite."""
    folder, options = prepared(path)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    if key:
        save_file(weights | {key: np.full_like(weights[key], np.nan)}, file)
    return folder, [*options, *which.split()]


BOTH, LATE = "guidance_batched=true", "fast.guidance.zero_steps=1"
ALONE = "fast.guidance.stop=0.5"
CACHED, HUGE = "fast.cache.schedule=XX.X", "guidance_scale=3.0e+38"
MIX = "the (mix of the predictions|sum of the sampler) is the first"
# The weights, how the run is, and the first part that is not finite.
FIRST = [
    ("blocks.0.ffn.net.2.bias", BOTH, "the output of layer 0"),
    *(("blocks.1.ffn.net.2.bias", which, "the output of layer 1") for which in (ALONE, LATE)),
    ("patch_embedding.bias", BOTH, "the input of layer 0"),
    ("condition_embedder.time_embedder.linear_1.bias", BOTH, "the embedding of the time"),
    ("condition_embedder.text_embedder.linear_1.bias", BOTH, "what the model makes of the prompt"),
    ("proj_out.weight", CACHED, "the model's output, after its last layer,"),
    *(("", which, MIX) for which in (HUGE, f"{HUGE} {ALONE}")),
]


@pytest.mark.parametrize(("key", "which", "part"), but(FIRST, lambda case: ALONE not in case[1]))
def test_the_first_part_is_named(key: str, which: str, part: str, tmp_path: Path) -> None:
    folder, options = broken(tmp_path, key, which)
    with pytest.raises(InputError) as error:
        run(folder, "wan", *options)
    value, step = str(error.value.value), 2 if which == LATE else 1
    assert re.match(f"not finite after step {step} of 4: {part}", value)
    remedy = "lower the guidance scale"
    assert "look at" in error.value.remedy if key else error.value.remedy == remedy
