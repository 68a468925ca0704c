"""From a prompt to pixels, beside diffusers' own pipelines: where torch, diffusers and transformers
are installed.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.closeness import hold
from tests.examples.conftest import ROOT
from tests.fixtures import make_pipelines as runs
from tests.fixtures import make_wan22 as wan22
from tests.fixtures.make_pipeline_runs import run_flux

from .pipelines import EXACT, MORE, SIZE, draw, sizes_of

PROMPT, NEGATIVE = "a red  fox in the snow", "rain &amp; blue"
FLUX = {name: partial(runs.flux, name) for name in runs.FLUXES}
WAN = {"wan": runs.wan, "wan_i2v": runs.wan_i2v, "wan_a14b": runs.wan_a14b, **wan22.BUILD}
BUILD = {**WAN, "sdxl": runs.sdxl, **FLUX}
PICTURES = ("sdxl", *FLUX)
NOISE = dict.fromkeys(PICTURES, (1, 4, 8, 12)) | dict.fromkeys(WAN, (1, 4, 3, 4, 6)) | wan22.NOISE
WITH_IMAGE = ("wan_i2v", "wan_ti2v_image", "wan_a14b_image")
TWO = ("wan_a14b", "wan_a14b_image")


@pytest.fixture(autouse=True)
def installed() -> None:
    for package in ("torch", "diffusers", "transformers", "ftfy"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def theirs(name: str, folder: Path, negative: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Save a pipeline and run it; return latents and pixels, 0 to 255."""
    import torch

    torch.manual_seed(1)
    pipe = BUILD[name]()
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    noise = np.random.default_rng(2).standard_normal(NOISE[name], np.float32)
    save_file({"noise": noise}, folder / "noise.safetensors")
    if name in FLUX:
        said = {"prompt": PROMPT, "negative_prompt": negative}
        latents, pixels = (
            run_flux(pipe, torch.from_numpy(noise), kind, **said) for kind in ("latent", "np")
        )
        return latents.numpy(), np.asarray(pixels)[0] * 255
    told: dict[str, Any] = {"prompt": PROMPT, "negative_prompt": negative, **SIZE[name]}
    if name in TWO:
        told["guidance_scale_2"] = runs.GUIDANCE_2
    if name in WITH_IMAGE:
        pixels = np.random.default_rng(4).integers(0, 255, (20, 30, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "first.png")
        told["image"] = Image.open(folder / "first.png").convert("RGB")
    told |= {
        "num_inference_steps": runs.STEPS,
        "guidance_scale": runs.GUIDANCE,
        "return_dict": False,
    }
    latents, pixels = (
        pipe(latents=torch.from_numpy(noise), output_type=kind, **told)[0]
        for kind in ("latent", "np")
    )
    return latents.numpy(), np.asarray(pixels)[0] * 255


def ours(name: str, folder: Path, *told: str) -> np.ndarray:
    """Draw with our command; return the latents."""
    file = folder / "latents.safetensors"
    paths = (
        "--model",
        folder,
        "--noise",
        folder / "noise.safetensors",
        "--latents",
        file,
        "--out",
        folder / "out",
    )
    text = [f"text_tokens={runs.FLUX_TEXT}"] if name in FLUX else []
    draw(name, *paths, *told, *EXACT, *MORE.get(name, ()), *sizes_of(name), *text)
    return load_file(file)["latents"]


def options(name: str, folder: Path, negative: str | None) -> list[str]:
    image = ["--image", str(folder / "first.png")] if name in WITH_IMAGE else []
    return ["--prompt", PROMPT, *(["--negative-prompt", negative] if negative else []), *image]


@pytest.mark.parametrize(
    ("name", "negative"),
    [
        ("wan", NEGATIVE),
        ("wan_i2v", NEGATIVE),
        ("wan_a14b", NEGATIVE),
        ("wan_a14b_image", NEGATIVE),
        ("wan_ti2v_text", NEGATIVE),
        ("wan_ti2v_image", NEGATIVE),
        ("sdxl", None),
        ("sdxl", NEGATIVE),
        ("flux", NEGATIVE),
        ("flux_schnell", None),
    ],
)
def test_from_prompt_to_pixels(name: str, negative: str | None, tmp_path: Path) -> None:
    latents, pixels = theirs(name, tmp_path, negative)
    got = ours(name, tmp_path, *options(name, tmp_path, negative))
    hold(f"{name}, latents", {"": got}, {"": latents}, 1e-4)
    if name in PICTURES:
        written = np.asarray(Image.open(tmp_path / "out" / "000.png"))
    else:
        from wan import torch_parts

        written = torch_parts.decode(tmp_path, got, "cpu")[0]
        from sample.media import find_ffmpeg

        video = "000.mp4" if find_ffmpeg() else "000"
        assert [path.name for path in (tmp_path / "out").iterdir()] == [video]
    sys.path.insert(0, str(ROOT / "examples"))
    import decode

    decode.main(
        decode.arguments_of(
            [str(tmp_path), str(tmp_path / "latents.safetensors"), "--out", str(tmp_path / "2")]
        )
    )
    files, again = (
        sorted(path for path in (tmp_path / of).rglob("*") if path.is_file()) for of in ("out", "2")
    )
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in again], (
        "from a latents file the same"
    )
    assert written.shape == pixels.shape
    off = np.abs(written - pixels).max()
    print(f"{name}, pixels: at most {off:.2f} of 255 levels")
    assert off <= 1.0, "half a level of rounding, and what latents are off"


@pytest.mark.parametrize("name", ["wan_i2v", "sdxl", "flux"])
def test_an_embeddings_file_is_the_prompt(name: str, tmp_path: Path) -> None:
    latents, _ = theirs(name, tmp_path, NEGATIVE)
    sys.path.insert(0, str(ROOT / "examples"))
    import embed

    size = [
        x
        for key, value in runs.VIDEO.items()
        for x in (f"--{key.removeprefix('num_')}", str(value))
    ]
    text = ["--text-tokens", str(runs.FLUX_TEXT)] if name in FLUX else []
    file = tmp_path / "told.safetensors"
    embed.main(
        embed.arguments_of(
            [str(tmp_path), *options(name, tmp_path, NEGATIVE), *size, *text, "--to", str(file)]
        )
    )
    got = ours(name, tmp_path, "--embeddings", str(file))
    hold(f"{name}, latents", {"": got}, {"": latents}, 1e-4)


def test_prompts_of_a_file_are_a_batch(tmp_path: Path) -> None:
    latents, _ = theirs("wan", tmp_path, NEGATIVE)
    sys.path.insert(0, str(ROOT / "examples"))
    import embed

    (tmp_path / "prompts.txt").write_text(f"a cat\n\n{PROMPT}\n")
    file = tmp_path / "told.safetensors"
    how = [
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--negative-prompt",
        NEGATIVE,
        "--to",
        str(file),
    ]
    embed.main(embed.arguments_of([str(tmp_path), *how]))
    assert load_file(file)["text"].shape == (2, 512, 8)
    noise = load_file(tmp_path / "noise.safetensors")["noise"]
    save_file({"noise": np.concatenate([noise, noise])}, tmp_path / "noise.safetensors")
    got = ours("wan", tmp_path, "--embeddings", str(file))
    hold("wan, latents", {"": got[1:]}, {"": latents}, 1e-4)
    assert np.abs(got[0] - got[1]).max() > 1e-2, "another prompt, another video"
