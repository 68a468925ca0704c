"""Runs the training command as a user does, in a process of its own with one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .conftest import HELD_OUT, ROOT, SMALL

COMMAND = (sys.executable, str(ROOT / "examples" / "train_wan.py"))


def config(folder: Path, **training: Any) -> Path:
    """Write a YAML file of a small model that trains in `folder` and draws nothing."""
    import yaml

    values = {
        "model": SMALL,
        "data": {"held_out": HELD_OUT},
        "training": {"batch_size": 8, "warmup_steps": 2, "output_dir": str(folder / "run"), "log_every": 1} | training,
        "sampling": {"per_prompt": 0},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(path: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start the command; its lines come out as they are printed."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    # Processes that run the same program compile it once.
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(path.parents[1] / "compiled")}
    compiled["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return subprocess.Popen(
        [*COMMAND, str(path), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | compiled,
    )


def finish(path: Path, *overrides: str) -> str:
    """Run the command to its end and return what it printed."""
    process = start(path, *overrides)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return printed


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Read every array of a checkpoint, by name, without the program that wrote it."""
    import jax
    import orbax.checkpoint as ocp

    tree = ocp.StandardCheckpointer().restore((folder / "run" / "checkpoints" / str(step) / "state").absolute())
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
