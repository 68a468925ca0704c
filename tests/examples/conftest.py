"""Puts `examples/` on the path, as it is for a user who runs a script in it, and a model small
enough to test with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from maxattn_examples.digits.settings import Settings  # noqa: E402
from maxattn_examples.digits.task import ClipTask  # noqa: E402
from maxattn_examples.train.loop import Training  # noqa: E402

SMALL = {
    "sizes": "wan-2.1-t2v-1.3b", "num_attention_heads": 2, "attention_head_dim": 16,
    "num_layers": 1, "ffn_dim": 32, "freq_dim": 8, "in_channels": 16, "out_channels": 9,
    "text_dim": 29, "dtype": "float32", "param_dtype": "float32",
}  # fmt: skip
DATA = {"source": "torus", "frames": 3}
SHORT = {
    "steps": 3, "batch_size": 8, "warmup_steps": 2, "checkpoint_every": 2, "export": False,
    "tensorboard": False, "learning_rate": 4e-3, "learning_rate_schedule": "cosine",
    "adam_b2": 0.99, "ema_decay": 0.99, "timestep_shift": 3.0, "log_every": 100,
}  # fmt: skip


@pytest.fixture(scope="package", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store each longer compiled program: most tests here train or sample the same small models.

    Tests of other folders share few programs, and storing one takes a fifth of its compile time.
    """
    from jax.experimental.compilation_cache import compilation_cache

    cache = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.3,
    }
    before = {name: getattr(jax.config, name) for name in cache}
    for settings in (cache, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if settings is cache:
            yield


@pytest.fixture(scope="session", autouse=True)
def one_writer_of_replicas() -> None:
    """Let one device write replicated arrays.

    With its default, Orbax lets each device write a slice, and compiles a program for every shape,
    which takes longer than these trainings.
    """
    ocp.type_handlers.get_type_handler(jax.Array)._use_replica_parallel = False  # type: ignore[attr-defined]


def small_settings(folder: Path) -> Settings:
    """Return settings for a model of one narrow block, three training steps, and a folder."""
    training = SHORT | {"output_dir": str(folder)}
    return Settings.model_validate({"model": SMALL, "data": DATA, "training": training})


@pytest.fixture
def small(tmp_path: Path) -> Settings:
    """A small model's settings with an empty output folder."""
    return small_settings(tmp_path / "run")


def train(settings: Settings, mesh: Any = None) -> tuple[Any, list[float]]:
    """Train the small model to the last step; return its average and the losses."""
    return Training(ClipTask.of(settings), mesh).run()


def trained(settings: Settings) -> Any:
    """Load the averaged model of the last checkpoint."""
    return Training(ClipTask.of(settings)).trained()
