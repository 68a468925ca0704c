"""The command that streams: a small Wan, its files, its scenes, and refused arguments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stream as command
from maxattn_examples.common.pipeline_folder import saying
from safetensors.numpy import load_file, save_file
from yaml import safe_dump

from maxattn import weights
from maxattn.errors import MaxattnError
from tests.examples.wan.streamed import SIZES, SMALL, plain
from tests.golden_text import check_refused

SETTINGS = {
    "model": {"sizes": "wan-2.1-t2v-1.3b", **SMALL, "dtype": "float32"},
    "rollout": {"frames_per_block": 3, "window": 3, "sink": 2, "denoising_steps": [1000, 500]},
    "sampling": {"height": 16, "width": 32, "guidance_scale": 1.0}
    | {"text_tokens": 5, "weights_dtype": "float32"},
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "stream.yml"
    path.write_text(safe_dump(SETTINGS))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a small model with random weights, trained block by block according to its config."""
    weights.save_diffusers(plain(), tmp_path / "model")
    says(tmp_path / "model", 3)
    return tmp_path / "model"


def says(folder: Path, frames: int | None) -> None:
    """Write config.json with the frames per block of a model; None: trained on whole videos."""
    (folder / "config.json").write_text(json.dumps(saying(SIZES.config(), frames)))


def stream(*arguments: Any) -> np.ndarray:
    run = command.run_of(command.arguments_of([str(a) for a in arguments]))
    return run.run()


def embeddings(path: Path, rows: int, **more: Any) -> Path:
    text = np.random.default_rng(0).normal(size=(rows, 5, 8)).astype(np.float32)
    save_file({"text": text} | more, path)
    return path


def test_blocks_are_kept_as_they_are_made(config: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    how = (config, "--prompt", "any", "--blocks", 2)
    made = stream(*how, "--switch", "1: other", "--latents", out)
    assert made.shape == (1, 4, 6, 2, 4)
    names = sorted(path.stem for path in out.iterdir())
    assert names == ["000000", "000003", "latents"]
    first, second, whole = (load_file(out / f"{name}.safetensors")["latents"] for name in names)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=2), made)
    np.testing.assert_array_equal(whole, made)
    assert "block 2/2" in capsys.readouterr().out
    # Up to the switch it is the video without one; then it is another.
    same = stream(*how, "--latents", tmp_path / "same")
    np.testing.assert_array_equal(same[:, :, :3], first)
    assert np.abs(same[:, :, 3:] - second).max() > 1e-4


@pytest.mark.slow
def test_guidance_scenes_and_weights_from_files(config: str, folder: Path, tmp_path: Path, capsys):
    """Weights of Self-Forcing do not name a block length, so a warning is printed."""
    says(folder, None)
    file = folder / "diffusion_pytorch_model.safetensors"
    negative = np.zeros((1, 5, 8), np.float32)
    told = embeddings(tmp_path / "told.safetensors", 2, negative_text=negative)
    given = (config, "sampling.guidance_scale=3", "--model", folder, "--embeddings", told)
    more = ("--weights", file, "--switch", 1, "--blocks", 2, "--latents", tmp_path / "out")
    made = stream(*given, *more)
    assert made.shape[2] == 6 and np.isfinite(made).all()
    assert "trained on whole videos" in capsys.readouterr().out


def trained_on(frames: int | None) -> Callable[[Path, Path], tuple[Any, ...]]:
    """Sample from a folder with so many frames per block; None: it names none."""

    def words(folder: Path, tmp_path: Path) -> tuple[Any, ...]:
        says(folder, frames)
        return from_folder(folder, tmp_path)

    return words


def weights_of_whole_videos(folder: Path, tmp_path: Path) -> tuple[Any, ...]:
    shutil.copytree(folder, tmp_path / "whole")
    says(tmp_path / "whole", None)
    return *from_folder(folder, tmp_path), "--weights", "whole"


def from_folder(folder: Path, tmp_path: Path) -> tuple[Any, ...]:
    told = embeddings(tmp_path / "told.safetensors", 1)
    return "--model", "model", "--embeddings", told.name


def short_prefix(folder: Path, tmp_path: Path) -> tuple[Any, ...]:
    latents = np.zeros((1, 4, 4, 2, 4), np.float32)
    save_file({"latents": latents}, tmp_path / "clean.safetensors")
    return "--prompt", "any", "--prefix", "clean.safetensors"


def too_few_rows(folder: Path, tmp_path: Path) -> tuple[Any, ...]:
    embeddings(tmp_path / "told.safetensors", 1)
    return "--embeddings", "told.safetensors", "--switch", "2"


# Words behind the command, with a prompt.
PROMPTED = {
    "a_switch_of_no_number": ("--switch", "a fox"),
    "a_switch_that_is_never_shown": ("--switch", "40: a fox"),
    "two_switches_at_once": ("--switch", "2: a fox", "--switch", "2: a cat"),
    "a_switch_without_a_prompt": ("--switch", "2"),
    "no_blocks_at_all": ("--blocks", "0"),
    "weights_without_a_model": ("--weights", "model"),
    "unipc": ("sampling.sampler=unipc",),
    "distilled": ("sampling.distilled=self_forcing",),
    "a_cache_of_steps": ("sampling.fast.cache.interval=3",),
    "an_image_model": ("model.in_channels=8",),
}
BAD: dict[str, Any] = {
    **{name: lambda *_, w=words: ("--prompt", "any", *w) for name, words in PROMPTED.items()},
    "nothing_to_show": lambda *_: (),
    "rows_of_other_scenes": too_few_rows,
    "blocks_of_another_length": trained_on(1),
    "a_model_of_whole_videos": trained_on(None),
    "weights_of_whole_videos": weights_of_whole_videos,
    "a_prefix_of_half_a_block": short_prefix,
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_command_refuses(name: str, config: str, folder: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("stream.yml", "--blocks", 3, "--latents", "out", *BAD[name](folder, tmp_path))
    check_refused(f"stream_wan/{name}", MaxattnError, stream, *words)
    assert not (tmp_path / "out").exists()


def test_small_sizes_are_those_of_the_file(config: str) -> None:
    run = command.run_of(command.arguments_of([config, "--latents", "out"]))
    assert all(getattr(run.task.sizes, key) == value for key, value in SMALL.items())
    assert (run.stream.tokens_per_frame, *run.sides) == (2, 2, 4, 4)
    assert run.denoising.times.tolist() == pytest.approx([1000.0, 2500 / 3])
