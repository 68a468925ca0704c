"""Sampling from folders: whole runs are diffusers' pipelines; on meshes, with LoRA, in one call or
two, the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.fixtures import make_pipelines as runs
from tests.waiting import but

from .pipelines import check, lora, pipeline, run, told

CASES = [(name, which) for name, ways in runs.SCHEDULERS.items() for which in ways]
# Wan's is below on a ring; images, and Flux without guidance, only change what the model is told.
SLOW = ("wan", "wan_i2v", "flux_schnell")


@pytest.mark.parametrize(
    ("name", "which"), but(CASES, lambda case: case[0] not in SLOW and case[1] != "ddim")
)
def test_a_whole_run_is_diffusers(name: str, which: str, tmp_path: Path) -> None:
    held, options = told(tmp_path, name)
    check(run(pipeline(tmp_path, name, which), name, *options), held[f"out.{which}"])


def test_two_calls_on_a_ring_are_one_call(tmp_path: Path) -> None:
    held, options = told(tmp_path, "wan")
    mesh = (
        "ici_fsdp_parallelism=1",
        "ici_context_parallelism=4",
        "ici_tensor_parallelism=2",
        "attention=ring",
    )
    got = run(pipeline(tmp_path, "wan", "unipc"), "wan", *options, *mesh, "guidance_batched=false")
    check(got, held["out.unipc"])


def test_samples_of_their_own_and_merged_lora(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, options = told(tmp_path, "wan")
    folder = pipeline(tmp_path, "wan", "unipc")
    merged = lora(tmp_path / "lora.safetensors", folder)
    no_noise = options[:2]
    many = run(
        folder,
        "wan",
        *no_noise,
        "--lora",
        tmp_path / "lora.safetensors",
        "--lora-scale",
        0.5,
        "--per-prompt",
        9,
    )
    said = capsys.readouterr().out
    assert "9 samples in 24 rows of the model, 6 of them to fill up the 8 devices" in said
    assert (
        "LoRA weights of 1 layers merged, times 0.5; 1 tensors for other parts than transformer"
        " are not" in said
    )
    assert many.shape == (9, 4, 3, 4, 6)
    assert len({sample.tobytes() for sample in many}) == 9, "each from noise of its own"
    (tmp_path / "trained").mkdir()
    save_file(merged, tmp_path / "trained" / "model.safetensors")
    check(run(folder, "wan", *no_noise, "--weights", tmp_path / "trained")[0], many[0])


def test_what_a_run_says_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, options = told(tmp_path, "wan")
    run(
        pipeline(tmp_path, "wan", "unipc"),
        "wan",
        *options,
        "guidance_scale=1",
        "ici_context_parallelism=8",
    )
    said = capsys.readouterr().out
    for line in (
        "self-attention  B=1 T=S=18 N=2 H=12 f32   mesh context=8",
        (
            "sampler   unipc, flow_shift 3.0, solver_order 2, prediction_type flow_prediction"
            " (scheduler/"
        ),
        "guidance  none",
        "latents   [4, 3, 4, 6]",
        "rows      1 samples in 1 rows of the model\n",
        "step 4/4  ",
    ):
        assert line in said
    from safetensors import safe_open

    with safe_open(tmp_path / "latents.safetensors", framework="numpy") as file:
        assert file.metadata() == {"model": str(tmp_path), "scaled": "true"}


def test_each_transformer_has_its_lora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights merged into files are what `--lora` and `--lora-2` merge; steps are said."""
    _, options = told(tmp_path, "wan_a14b")
    folder = pipeline(tmp_path, "wan_a14b", "unipc")
    files = {
        "transformer": tmp_path / "one.safetensors",
        "transformer_2": tmp_path / "two.safetensors",
    }
    merged = {part: lora(path, folder, part) for part, path in files.items()}
    given = ("--lora", files["transformer"], "--lora-2", files["transformer_2"])
    given = (*given, "--lora-scale", 0.5)
    got = run(folder, "wan_a14b", *options, *given)
    said = capsys.readouterr().out
    assert "expert    transformer, steps 1 to 2, guidance 4\n" in said
    assert "expert    transformer_2, steps 3 to 4, guidance 2.5\n" in said
    for part, tensors in merged.items():
        save_file(tensors, folder / part / "diffusion_pytorch_model.safetensors")
    check(got, run(folder, "wan_a14b", *options))


@pytest.mark.parametrize("trained", but(["transformer", "transformer_2"], ["transformer_2"]))
def test_weights_of_one_transformer_stand_beside_the_model_s_other(
    trained: str, tmp_path: Path
) -> None:
    """A training run leaves one of them."""
    _, options = told(tmp_path, "wan_a14b")
    folder = pipeline(tmp_path, "wan_a14b", "unipc")
    file = f"{trained}/diffusion_pytorch_model.safetensors"
    changed = {name: x * np.float32(1.5) for name, x in load_file(folder / file).items()}
    (tmp_path / "run" / trained).mkdir(parents=True)
    save_file(changed, tmp_path / "run" / file)
    got = run(folder, "wan_a14b", *options, "--weights", tmp_path / "run")
    save_file(changed, folder / file)
    check(got, run(folder, "wan_a14b", *options))


def test_without_an_image_the_first_frame_is_drawn(tmp_path: Path) -> None:
    """A model that may continue an image draws videos of text alone, at one time."""
    held, options = told(tmp_path, "wan_ti2v")
    folder = pipeline(tmp_path, "wan_ti2v", "unipc")
    begun = run(folder, "wan_ti2v", *options)
    np.testing.assert_array_equal(begun[:, :, :1], held["first"])
    save_file({k: held[k] for k in ("text", "negative_text")}, tmp_path / "told.safetensors")
    drawn = run(folder, "wan_ti2v", *options)
    (folder / "model_index.json").unlink()
    check(drawn, run(folder, "wan_ti2v", *options))
    assert np.abs(drawn - begun).max() > 0.1
