"""Run the training command in separate processes, each with one device by default."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.examples.conftest import DATA, ROOT, SHORT, SMALL

COMMAND = (sys.executable, str(ROOT / "examples" / "train.py"))
# How long a run may say nothing: it imports and compiles in silence, and the machine may be busy
# with other things.
SILENCE = 600.0


def config(folder: Path, **training: Any) -> Path:
    """Write a YAML file for a small model that trains in `folder` and draws no samples."""
    import yaml

    values = {
        "model": SMALL,
        "data": DATA,
        "sampling": {"per_prompt": 0},
        "training": {**SHORT, "output_dir": str(folder / "run"), "log_every": 1, **training},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(path: Path, *overrides: str, devices: int = 1) -> subprocess.Popen[str]:
    """Start the command with unbuffered output."""
    quick = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    # Processes that run the same program compile it once.
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(path.parents[1] / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": " ".join([f"--xla_force_host_platform_device_count={devices}", *quick]),
    }
    return subprocess.Popen(
        [*COMMAND, str(path), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **compiled},
    )


def finish(path: Path) -> str:
    """Run the command to its end and return what it printed."""
    return finish_all([start(path)])[0]


def finish_many(path: Path, *overrides: str, processes: int, devices: int) -> list[str]:
    """Run the command in several processes that join each other, and return the output of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    who = ("--coordinator", f"localhost:{port}", "--num-processes", str(processes), "--process-id")
    return finish_all(
        [start(path, *overrides, *who, str(i), devices=devices) for i in range(processes)]
    )


def finish_all(started: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for processes to end, and return the output of each."""
    printed = ["" for _ in started]
    for who, line in lines(*started):
        printed[who] += line
    codes = [process.wait() for process in started]
    assert not any(codes), "\n".join([str(codes), *printed])
    return printed


def lines(*started: subprocess.Popen[str]) -> Iterator[tuple[int, str]]:
    """Yield each line of output with its process; fail after `SILENCE` seconds without a line."""
    heard: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def listen(who: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            heard.put((who, line))
        heard.put((who, None))

    for who, process in enumerate(started):
        threading.Thread(target=listen, args=(who, process), daemon=True).start()
    speaking = len(started)
    while speaking:
        try:
            who, line = heard.get(timeout=SILENCE)
        except queue.Empty:
            for process in started:
                process.kill()
            raise AssertionError(f"nothing printed for {SILENCE:g} s") from None
        if line is None:
            speaking -= 1
        else:
            yield who, line


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Read every array of a checkpoint, by name, without the program that wrote it."""
    import jax
    import orbax.checkpoint as ocp

    path = (folder / "run" / "checkpoints" / str(step) / "state").absolute()
    with ocp.PyTreeCheckpointer() as reader:
        found = reader.metadata(path).item_metadata.tree
        # As numpy, whatever devices wrote it.
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), found)
        tree = reader.restore(path, restore_args=how)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
