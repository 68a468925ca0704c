"""Sampling from folders: whole runs are diffusers' pipelines; on meshes, with LoRA, in one call or two, the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.fixtures import make_pipelines as runs

from .pipelines import EXACT, draw, pipeline, sizes_of, told

CASES = [(name, which) for name, ways in runs.SCHEDULERS.items() for which in ways]
ONE = ("ici_data_parallelism=1", "ici_fsdp_parallelism=1", "ici_context_parallelism=1", "ici_tensor_parallelism=1")


def run(folder: Path, name: str, *arguments: str) -> np.ndarray:
    """Draw from a folder, and return the latents that were written."""
    file = folder / "latents.safetensors"
    draw(name, "--model", folder, *EXACT, *sizes_of(name), "--latents", file, *arguments)
    return load_file(file)["latents"]


def check(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(("name", "which"), CASES)
def test_a_whole_run_is_diffusers(name: str, which: str, tmp_path: Path) -> None:
    held, options = told(tmp_path, name)
    check(run(pipeline(tmp_path, name, which), name, *options), held[f"out.{which}"])
