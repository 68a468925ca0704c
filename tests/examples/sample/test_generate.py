"""Sampling from folders: runs equal diffusers' pipelines, and do not depend on mesh or batching."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from maxattn.errors import ConfigError
from tests.fixtures import make_pipelines as runs
from tests.waiting import but

from .pipelines import check, lora, pipeline, prepared, run, told

CASES = [(name, which) for name, ways in runs.SCHEDULERS.items() for which in ways]
# Wan's is below on a ring; images, and Flux without guidance, only change what the model is told;
# SDXL's compiles for long.
SLOW = ("wan", "wan_i2v", "flux_schnell", "sdxl")


@pytest.mark.parametrize(("name", "which"), but(CASES, lambda case: case[0] not in SLOW))
def test_a_whole_run_is_diffusers(name: str, which: str, tmp_path: Path) -> None:
    held, options = told(tmp_path, name)
    check(run(pipeline(tmp_path, name, which), name, *options), held[f"out.{which}"])


@pytest.mark.slow
def test_two_calls_on_a_ring_are_one_call(tmp_path: Path) -> None:
    held, options = told(tmp_path, "wan")
    mesh = ("ici_fsdp_parallelism=1", "ici_context_parallelism=4", "ici_tensor_parallelism=2")
    how = (*mesh, "attention=ring", "guidance_batched=false")
    check(run(pipeline(tmp_path, "wan", "unipc"), "wan", *options, *how), held["out.unipc"])


@pytest.mark.slow
def test_many_samples_with_merged_lora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, options = prepared(tmp_path)
    file, no_noise = tmp_path / "lora.safetensors", options[:2]
    merged = lora(file, folder)
    many = run(folder, "wan", *no_noise, "--lora", file, "--lora-scale", 0.5, "--per-prompt", 9)
    printed = capsys.readouterr().out
    assert "9 samples in 24 rows of the model, 6 of them to fill up the 8 devices" in printed
    said = "1 layers merged, times 0.5; 1 tensors for other parts than transformer are not"
    assert f"LoRA weights of {said}" in printed
    assert many.shape == (9, 4, 3, 4, 6)
    assert len({sample.tobytes() for sample in many}) == 9, "each from noise of its own"
    (tmp_path / "trained").mkdir()
    save_file(merged, tmp_path / "trained" / "model.safetensors")
    check(run(folder, "wan", *no_noise, "--weights", tmp_path / "trained")[0], many[0])


@pytest.mark.slow
def test_lora_of_image_to_video_and_names_of_ones_own(tmp_path: Path) -> None:
    """Following the remedies of each refusal ends with the merged model."""
    (folder, options), file = prepared(tmp_path), tmp_path / "lora.safetensors"
    merged = lora(file, folder)
    (tmp_path / "trained").mkdir()
    save_file(merged, tmp_path / "trained" / "model.safetensors")
    want = run(folder, "wan", *options, "--weights", tmp_path / "trained")
    how = (*options, "--lora", file, "--lora-scale", 0.5)
    image = {
        f"transformer.blocks.1.attn2.add_k_proj.lora_{x}.weight": np.ones((2, 2)) for x in "AB"
    }
    save_file(load_file(file) | image, file)
    with pytest.raises(ConfigError) as error:
        run(folder, "wan", *how)
    assert error.value.remedy.startswith("give --lora-lenient to leave out what does not fit")
    check(run(folder, "wan", *how, "--lora-lenient"), want)
    renamed = {
        n.replace("blocks.1.attn1.to_q", "mine.1.query"): x for n, x in load_file(file).items()
    }
    save_file({n: x for n, x in renamed.items() if "attn2" not in n}, file)
    (tmp_path / "names.yml").write_text("mine.*.query: blocks.*.attn1.to_q\n")
    check(run(folder, "wan", *how, "--lora-names", tmp_path / "names.yml"), want)


LINES = (
    "self-attention  B=1 T=S=18 N=2 H=12 f32   mesh context=8",
    "sampler   unipc, flow_shift 3.0, solver_order 2, prediction_type flow_prediction (scheduler/",
    "guidance  none: 4 forwards\n",
    "latents   [4, 3, 4, 6]",
    "rows      1 samples in 1 rows of the model\n",
    "step 4/4  ",
)


def test_the_lines_and_the_metadata_of_a_run(tmp_path: Path, capsys: Any) -> None:
    _, options = told(tmp_path, "wan")
    how = ("guidance_scale=1", "ici_context_parallelism=8")
    run(pipeline(tmp_path, "wan", "unipc"), "wan", *options, *how)
    printed = capsys.readouterr().out
    assert not [line for line in LINES if line not in printed], printed
    with safe_open(tmp_path / "latents.safetensors", framework="numpy") as file:
        assert file.metadata() == {"model": str(tmp_path), "scaled": "true"}


@pytest.mark.slow
def test_each_transformer_has_its_lora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--lora` and `--lora-2` equal weights that were merged into files; steps are printed."""
    folder, options = prepared(tmp_path, "wan_a14b")
    files = {part: tmp_path / f"{part}.safetensors" for part in ("transformer", "transformer_2")}
    merged = {part: lora(path, folder, part) for part, path in files.items()}
    how = (*options, "fast.guidance.rescale=0.5")
    one, two = files.values()
    got = run(folder, "wan_a14b", *how, "--lora", one, "--lora-2", two, "--lora-scale", 0.5)
    printed = capsys.readouterr().out
    assert "expert    transformer, steps 1 to 2, guidance 4\n" in printed
    assert "expert    transformer_2, steps 3 to 4, guidance 2.5\n" in printed
    assert re.search(r"\w{16} and \w{16}, LoRA transformer: \w{16} x 0.5, LoRA tr.*_2: ", printed)
    for part, tensors in merged.items():
        save_file(tensors, folder / part / "diffusion_pytorch_model.safetensors")
    check(got, run(folder, "wan_a14b", *how))


@pytest.mark.slow
def test_weights_of_one_transformer_are_used_beside_the_model_s_other(tmp_path: Path) -> None:
    """A training run exports only one of the two transformers."""
    trained = "transformer_2"
    folder, options = prepared(tmp_path, "wan_a14b")
    file = f"{trained}/diffusion_pytorch_model.safetensors"
    changed = {name: x * np.float32(1.5) for name, x in load_file(folder / file).items()}
    (tmp_path / "run" / trained).mkdir(parents=True)
    save_file(changed, tmp_path / "run" / file)
    got = run(folder, "wan_a14b", *options, "--weights", tmp_path / "run")
    save_file(changed, folder / file)
    check(got, run(folder, "wan_a14b", *options))


@pytest.mark.slow
def test_without_an_image_the_first_frame_is_drawn(tmp_path: Path) -> None:
    """A model that can continue an image also samples from text alone, with one time per video."""
    held, options = told(tmp_path, "wan_ti2v")
    folder = pipeline(tmp_path, "wan_ti2v", "unipc")
    begun = run(folder, "wan_ti2v", *options)
    np.testing.assert_array_equal(begun[:, :, :1], held["first"])
    save_file({k: held[k] for k in ("text", "negative_text")}, tmp_path / "told.safetensors")
    drawn = run(folder, "wan_ti2v", *options)
    (folder / "model_index.json").unlink()
    check(drawn, run(folder, "wan_ti2v", *options))
    assert np.abs(drawn - begun).max() > 0.1
