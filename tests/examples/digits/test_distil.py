"""A student learns in one step what its teacher does in several guided steps."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.digits.task import DistilTask
from maxattn_examples.train.checkpoint import export
from maxattn_examples.train.loop import Training

from maxattn.config import ConfigErrors

from .small import settings

FEW = (
    "training.distil={substeps: 3, guidance_scale: 1.5}", "sampling.sampler=flow_euler",
    "sampling.guidance_scale=1", "sampling.num_inference_steps=3", "sampling.warped=true",
    "sampling.sigmas=[1.0, 0.9, 0.5]", "model.dtype=float32", "sampling.weights_dtype=float32",
    "training.export_dtype=float32", "sampling.timestep_shift=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with random weights."""
    folder = tmp_path_factory.mktemp("teacher")
    task = DistilTask.of(settings(folder, *FEW))
    export(task, task.build(None, nnx.Rngs(0)), folder)
    return folder


def student(folder: Path, out: Path, *more: str) -> DistilTask:
    return DistilTask.of(settings(out, *FEW, f"model.folder={folder}", *more))


@pytest.mark.slow
def test_the_student_learns_the_velocity_of_the_teachers_steps(folder: Path, tmp_path: Path):
    task = student(folder, tmp_path, "data.frames_seen=3")
    np.testing.assert_allclose(task.sigmas, [1, 0.9, 0.5, 0])
    empty = {name: jnp.asarray(x) for name, x in task.source().empty.items()}
    batch = {"clip": jnp.arange(8)}
    found = jax.jit(task.noised)(batch, empty, jax.random.key(1))
    begin = np.asarray(found["times"])
    assert set(begin) <= {np.float32(1), np.float32(0.9), np.float32(0.5)} and len(set(begin)) > 1
    end = np.select([begin == 1, begin > 0.6], [0.9, 0.5], 0.0)
    x, text = np.asarray(found["mixed"]), found["text"]
    frames = found["positions"][0]

    def velocity(x: np.ndarray, t: np.ndarray, text: jax.Array) -> np.ndarray:
        at = jnp.asarray(1000 * t, jnp.float32)
        return np.asarray(task.teacher(jnp.asarray(x), at, text, positions=frames), np.float64)

    for k in range(3):
        t = begin + (end - begin) * k / 3
        away, towards = (velocity(x, t, some) for some in (jnp.zeros_like(text), text))
        width = ((end - begin) / 3).reshape(-1, 1, 1, 1, 1)
        x = (x + width * (away + 1.5 * (towards - away))).astype(np.float32)
    wanted = (x - np.asarray(found["mixed"])) / (3 * width)
    np.testing.assert_allclose(found["velocity"], wanted, atol=2e-3)


@pytest.mark.slow
def test_a_student_begins_as_its_teacher_and_learns(folder: Path, tmp_path: Path):
    more = ("training.steps=2", "training.warmup_steps=0", "training.batch_size=8")
    task = student(folder, tmp_path, *more)
    model, losses = Training(task, task.settings.make_mesh()).run()
    assert len(losses) == 2 and np.isfinite(losses).all()
    kernel, before = (np.asarray(m.proj_out.kernel[...]) for m in (model, task.teacher))
    assert 0 < np.abs(kernel - before).max() < 0.01


def test_settings_that_fit_no_student_are_refused_together(tmp_path: Path):
    wrong = ("sampling.sampler=unipc", "sampling.guidance_scale=2", "sampling.sigmas=null")
    task = DistilTask.of(settings(tmp_path, *FEW, *wrong, "sampling.warped=null"))
    with pytest.raises(ConfigErrors) as refused:
        Training(task)
    for words in (
        "a student begins as its teacher", "trained for Euler steps", "learns guidance from its",
    ):  # fmt: skip
        assert words in str(refused.value)
