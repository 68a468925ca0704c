"""A run that stops being finite ends at that step, and says in which layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxattn.errors import InputError

from .pipelines import pipeline, run, told


def broken(path: Path, name: str, layer: int, which: str) -> tuple[Path, list[Any]]:
    """Write a pipeline whose weights overflow in one layer."""
    _, options = told(path, "wan")
    folder = pipeline(path, "wan", "unipc")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    key = f"blocks.{layer}.{name}"
    weights[key] = np.full_like(weights[key], np.nan)
    save_file(weights, file)
    return folder, [*options, which]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("which", ["guidance_batched=true", "fast.guidance.stop=0.5"])
def test_the_step_and_the_layer_are_named(layer: int, which: str, tmp_path: Path) -> None:
    folder, options = broken(tmp_path, "ffn.net.2.bias", layer, which)
    with pytest.raises(InputError) as error:
        run(folder, "wan", *options)
    said = f"not finite after step 1 of 4: the output of layer {layer}"
    assert str(error.value.value).startswith(said)


def test_a_guidance_that_overflows_is_named(tmp_path: Path) -> None:
    _, options = told(tmp_path, "wan")
    folder = pipeline(tmp_path, "wan", "unipc")
    with pytest.raises(InputError) as error:
        run(folder, "wan", *options, "guidance_scale=3.0e+38")
    assert "what layers give is, and the sum of the sampler is not" in str(error.value.value)
