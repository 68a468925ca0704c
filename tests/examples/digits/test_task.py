"""The digits model trains, resumes, exports and samples without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import compare
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generate import main as draw
from maxattn_examples.digits.scenes import Size, of_model
from maxattn_examples.digits.settings import Settings, describes_clips
from maxattn_examples.digits.task import ClipTask, some_frames
from maxattn_examples.digits.words import SCENES
from maxattn_examples.train.loop import Training
from PIL import Image

from maxattn.config import ConfigErrors
from maxattn.weights import SafeTensors

from .small import CONFIG, overrides, settings


def trained(folder: Path, *more: str) -> tuple[Any, list[float]]:
    return Training(ClipTask.of(settings(folder, *more))).run()


def test_the_shipped_file_describes_clips_of_12480_tokens():
    task = ClipTask.of(Settings.from_yaml(CONFIG))
    assert task.size == Size(13, 48, 80, 16)
    assert task.tokens(task.source().shapes) == 12_480
    assert task.sizes.dim == 384 and task.sizes.text_dim == SCENES.width
    assert not list(task.shape_errors(task.source().shapes))
    model = nnx.eval_shape(lambda: task.build(None, nnx.Rngs(0)))
    assert 2 * sum(x.size for x in jax.tree.leaves(nnx.state(model))) < 60e6  # bytes of bfloat16


def test_a_file_is_for_clips_if_its_data_has_a_source():
    tiny = str(CONFIG.parent / "wan_tiny.yml")
    assert describes_clips(str(CONFIG), []) and describes_clips(tiny, ["data.source=digits"])
    assert not describes_clips(tiny, []) and not describes_clips("no such file", [])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[float]]:
    """A run of three steps on three of five frames."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *trained(folder, "training.steps=3", "data.frames_seen=3")


@pytest.mark.slow
def test_a_run_goes_on_and_equals_one_without_a_break(whole: Any, tmp_path: Path):
    _, model, losses = whole
    trained(tmp_path, "training.steps=2", "data.frames_seen=3")
    parts, again = trained(tmp_path, "training.steps=3", "data.frames_seen=3")
    assert losses == again and len(losses) == 3
    pairs = zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, parts)), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_exported_matrices_are_bfloat16_and_training_goes_on_from_them(whole: Any, tmp_path: Path):
    folder, model, _ = whole
    held = SafeTensors(folder / "transformer")
    kernel = model.proj_out.kernel[...]
    same, bfloat16 = np.testing.assert_array_equal, np.asarray(kernel.astype(jnp.bfloat16))
    same(np.asarray(held["proj_out.weight"][...]).T, bfloat16)
    table = np.asarray(model.scale_shift_table[...])
    same(np.asarray(held["scale_shift_table"][...]).reshape(table.shape), table)
    task = ClipTask.of(settings(tmp_path, f"model.folder={folder}"))
    found: Any = nnx.eval_shape(lambda: task.build(None, nnx.Rngs(1)))
    assert task.load(found, None) and found.proj_out.kernel[...].dtype == jnp.float32
    same(found.proj_out.kernel[...], bfloat16)


def test_a_prompt_is_drawn_without_torch(whole: Any, tmp_path: Path):
    more = ["--model", str(whole[0]), "--steps", "2", "--latents", str(tmp_path / "x.safetensors")]
    more += ["--prompt", "an orange two leaving left"]
    command = [str(CONFIG), *overrides(tmp_path)]
    with pytest.raises(Exception, match="'orange' is in the place of one of red, green"):
        draw([*command, *more])
    more = [*more[:-1], "a red two leaving left", "--out", str(tmp_path / "drawn")]
    draw([*command, *more])
    ways = ["--setting", "one/step", "num_inference_steps=1", "--report", str(tmp_path / "x.yml")]
    words = [*command, *more[:4], *more[6:], *ways, "--floor", "none"]
    compare.main(words)
    assert {x.name for x in tmp_path.glob("drawn/*_*")} == {"00_dense", "01_one_step"}
    assert "SSIM:" in (tmp_path / "x.yml").read_text()
    latents = SafeTensors(tmp_path / "x.safetensors")["latents"][...]
    assert latents.shape == (1, 3, 5, 8, 12)
    if (tmp_path / "drawn" / "000.mp4").exists():
        return  # frames are pictures where no ffmpeg writes videos
    with Image.open(tmp_path / "drawn" / "000" / "0004.png") as picture:
        shown = np.asarray(picture)[::4, ::4]
    wanted = 255 * np.asarray(of_model(jnp.asarray(latents[0, :, 4])))
    np.testing.assert_allclose(shown, np.moveaxis(wanted, 0, -1), atol=0.51)


def test_a_step_sees_the_clip_of_its_number_at_the_positions_that_it_says(tmp_path: Path):
    task = ClipTask.of(settings(tmp_path, "data.frames_seen=3", "training.timestep_shift=1.0e-6"))
    empty = task.source().empty
    batch = {"clip": jnp.asarray([7, 900_000])}
    found = jax.jit(task.noised)(batch, empty, jax.random.key(0))
    everything = ClipTask.of(settings(tmp_path, "training.timestep_shift=1.0e-6"))
    # next to no noise
    clips = np.asarray(jax.jit(everything.noised)(batch, empty, jax.random.key(0))["mixed"])
    found = jax.tree.map(np.asarray, found)
    for row in range(2):
        seen = clips[row][found["positions"][row]]
        np.testing.assert_allclose(found["mixed"][row], seen, atol=1e-3)


def test_frames_are_drawn_without_repeats_and_each_as_often():
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = np.asarray(jax.vmap(lambda key: some_frames(key, Size(13, 8, 8, 4), 5))(keys))
    assert drawn.shape == (4000, 5) and (np.diff(drawn) > 0).all()
    counts = np.bincount(drawn.ravel(), minlength=13) / 4000
    np.testing.assert_allclose(counts, 5 / 13, atol=0.03)


def test_settings_that_fit_no_clips_are_refused_together(tmp_path: Path):
    wrong = ["data.digit=8", "data.frames_seen=6", "model.text_dim=48"]
    with pytest.raises(ConfigErrors) as refused:
        trained(tmp_path, *wrong)
    said = str(refused.value)
    for words_of_it in (
        "a digit moves within frames of 8x12", "use at most 7", "a clip has 5 frames",
        "in_channels 3, out_channels 3, text_dim 49",
    ):  # fmt: skip
        assert words_of_it in said
