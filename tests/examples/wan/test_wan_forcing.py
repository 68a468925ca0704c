"""Tiny Wan trained by forcing: a step's loss and gradients, on meshes too, and refused clips.

Messages: golden/forcing.txt.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.common import hosts
from maxattn_examples.common.forcing import Forcing
from maxattn_examples.common.pipeline_folder import block_errors, frames_per_block
from maxattn_examples.train.step import build
from maxattn_examples.wan.settings import Settings, TrainingSettings
from maxattn_examples.wan.task import WanTask

import maxattn as ma
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.masks import Full, TeacherForcing, VideoMask
from tests.examples.train.made import I2V, WAN, begin, drawn, folder, wan
from tests.golden_text import check_refused
from tests.waiting import but

FRAMES = 4
ROLLOUT = {"frames_per_block": 2, "window": 2}
TEACHER = {"forcing": "teacher", "context_noise": 100.0}


def forced(path: Path, model: dict[str, Any], data: str | None = None, **training: Any) -> Settings:
    """Return the settings of a run by forcing."""
    settings = wan(path, model, data, **training)
    return settings.replace(rollout=Settings.model_validate({"rollout": ROLLOUT}).rollout)


@pytest.mark.slow
def test_the_loss_is_that_of_one_forward_beside_the_clean_clip(tmp_path: Path):
    """The model is image-to-video, which has all inputs of text-to-video."""
    settings = forced(tmp_path, I2V | {"num_layers": 1}, **TEACHER)
    task = WanTask.of(settings)
    model: Any = task.build(None, nnx.Rngs(0))
    model.proj_out.kernel[...] = jax.random.normal(jax.random.key(3), model.proj_out.kernel.shape)
    shapes = {"latents": (4, FRAMES, 4, 4), "condition": (8, FRAMES, 4, 4)}
    batch = {n: jnp.asarray(x) for n, x in drawn("i2v", 2, **shapes).items()}
    examples = task.noised(batch, {"text": jnp.zeros((3, 6))}, jax.random.key(0))
    assert examples["times"].shape == (2, FRAMES)
    assert (examples["times"][:, ::2] == examples["times"][:, 1::2]).all()

    def whole(x: Any) -> Any:
        return jnp.concatenate([x, jnp.moveaxis(batch["condition"], 1, -1)], axis=-1)

    clean, t_clean = whole(examples["context"]), 1000 * examples["context_times"]
    seen = Forcing(settings.rollout.stream(4), clean, t_clean)
    told = (examples["text"], examples.get("image"))
    mixed, t = whole(examples["mixed"]), 1000 * examples["times"]
    velocity = nnx.jit(lambda m: m(mixed, t, *told, forcing=seen))(model)
    wanted = np.mean((np.asarray(velocity) - np.asarray(examples["velocity"])) ** 2)
    assert float(nnx.jit(task.loss)(model, examples)) == pytest.approx(float(wanted), 1e-5)


def test_plans_are_those_of_both_clips(tmp_path: Path):
    shapes = {"latents": (4, FRAMES, 4, 4), "text": (3, 6)}
    kinds = {"teacher": TeacherForcing, "diffusion": VideoMask}
    for how, kind in kinds.items():
        found = WanTask.of(forced(tmp_path, WAN, forcing=how)).plans(shapes, None)["self"]
        assert isinstance(found.call.mask, kind)
    assert WanTask.of(wan(tmp_path, WAN)).plans(shapes, None)["self"].call.mask == Full()


# train/ has runs that learn and go on; the step on a mesh has the gradients of forcing.
@pytest.mark.slow
def test_a_run_learns_and_goes_on_bit_for_bit(tmp_path: Path):
    data = folder(tmp_path / "data", "wan", latents=(4, FRAMES, 4, 4))
    settings = forced(tmp_path, WAN | {"num_layers": 1}, data, forcing="teacher", steps=3)
    _, whole = begin(settings).run()
    assert np.isfinite(whole).all()
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    assert begin(settings).run()[1] == whole


@pytest.mark.slow
def test_an_exported_folder_names_the_frames_of_a_block(tmp_path: Path):
    """After a further training on whole videos it does not."""
    data = folder(tmp_path / "data", "wan", latents=(4, FRAMES, 4, 4))
    how = {"export": True, "steps": 1}
    begin(forced(tmp_path / "a", WAN, data, forcing="teacher", **how)).run()
    made = tmp_path / "a" / "transformer"
    assert frames_per_block(made) == 2
    assert not list(block_errors("model.folder", made, 2))
    again = {"folder": str(made), "dtype": "float32"}
    begin(forced(tmp_path / "b", again, data, **how)).run()
    assert frames_per_block(tmp_path / "b" / "transformer") is None


def test_clips_of_parts_of_blocks_are_refused(tmp_path: Path):
    data = folder(tmp_path / "data", "wan", latents=(4, 5, 4, 4))
    settings = forced(tmp_path / "run", WAN, data, **TEACHER)
    check_refused("forcing/part_of_a_block", ConfigErrors, begin, settings)


CONTEXT = {"context_noise": 50.0, "context_dropout": 0.5}
REFUSED: dict[str, dict[str, Any]] = {
    "pictures": {"forcing": "teacher", "picture_every": 10},
    "context_of_none": {"forcing": "none", **CONTEXT},
    "context_of_diffusion": {"forcing": "diffusion", **CONTEXT},
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_of_other_forcing_are_refused(case: str):
    check_refused(f"forcing/{case}", ConfigError, TrainingSettings, **REFUSED[case])


# ---- on meshes -----------------------------------------------------------------------------------


FOUR = {"context": 2, "tensor": 2}
ALL = {"data": 2} | FOUR
# Clips of 8 frames are dealt to 4 devices as whole blocks of 2; those of 6 frames stay as they are.
CASES = [("teacher", 8, FOUR), ("diffusion", 8, ALL), ("teacher", 6, {"context": 4})]


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    names = {f"ici_{axis}_parallelism": n for axis, n in sizes.items()}
    config = ma.AttentionConfig(**{"ici_data_parallelism": 1} | names)
    return config.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))])


def gradients(task: WanTask, mesh: Any, frames: int) -> tuple[Any, Any]:
    """Return loss and gradients of a run's first step."""
    graph, parameters = nnx.split(build(task, mesh))
    examples = drawn("wan", 2, latents=(4, frames, 4, 4))
    rows = hosts.rows_here(2, mesh)
    batch = {n: hosts.on_devices(x[rows], rows, 2, mesh) for n, x in examples.items()}

    @jax.jit
    def of(parameters: Any, batch: Any) -> Any:
        noised = task.noised(batch, {"text": jnp.zeros((3, 6))}, jax.random.key(0))
        return jax.value_and_grad(lambda p: task.loss(nnx.merge(graph, p), noised))(parameters)

    return of(parameters, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "frames", "sizes"), but(CASES, CASES[:1]))
def test_a_step_on_a_mesh_is_that_of_one_device(
    how: str, frames: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    noise = {"context_noise": 100.0, "context_dropout": 0.5} if how == "teacher" else {}
    rollout = {"frames_per_block": 2, "window": 2, "sink": 1}
    settings = wan(tmp_path, WAN | {"num_layers": 1}, forcing=how, batch_size=2, **noise)
    settings = settings.replace(rollout=Settings.model_validate({"rollout": rollout}).rollout)
    task = WanTask.of(settings)
    (loss, grads), (wanted, of_one) = (gradients(task, x, frames) for x in (mesh_of(sizes), None))
    assert float(loss) == pytest.approx(float(wanted), 1e-5)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(of_one), strict=True):
        scale = float(jnp.abs(want).max()) if want.size else 0.0
        np.testing.assert_allclose(got, want, atol=1e-5 * scale + 1e-7)
