"""From a prompt to pixels, compared with diffusers' pipelines if torch and diffusers are there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import decode
import embed
import numpy as np
import pytest
from maxattn_examples.sample.torch_parts import find_ffmpeg
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.closeness import hold
from tests.fixtures import make_pipelines as runs
from tests.fixtures.make_pipeline_runs import run_flux
from tests.packages import skip_without

from .pipelines import run

PROMPT, NEGATIVE = "a red  fox in the snow", "rain &amp; blue"
FLUX = {name: partial(runs.flux, name) for name in runs.FLUXES}
WAN = {"wan": runs.wan, "wan_i2v": runs.wan_i2v, "wan_a14b": runs.wan_a14b, **runs.WAN_2_2}
BUILD = {**WAN, "sdxl": runs.sdxl, **FLUX}
PICTURES = ("sdxl", *FLUX)
NOISE = dict.fromkeys(PICTURES, (1, 4, 8, 12)) | dict.fromkeys(WAN, (1, 4, 3, 4, 6))
NOISE |= dict.fromkeys(("wan_ti2v_text", "wan_ti2v_image"), (1, runs.TI2V_CHANNELS, 3, 2, 4))
WITH_IMAGE = ("wan_i2v", "wan_ti2v_image", "wan_a14b_image")


@pytest.fixture(autouse=True)
def installed() -> None:
    skip_without("torch", "diffusers", "transformers", "ftfy")


def theirs(name: str, folder: Path, negative: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Save a pipeline and run it; return latents and pixels, 0 to 255."""
    import torch

    torch.manual_seed(1)
    pipe = BUILD[name]()
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    noise = np.random.default_rng(2).standard_normal(NOISE[name], np.float32)
    save_file({"noise": noise}, folder / "noise.safetensors")
    given: dict[str, Any] = {"prompt": PROMPT, "negative_prompt": negative}
    if name in WITH_IMAGE:
        pixels = np.random.default_rng(4).integers(0, 255, (20, 30, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "first.png")
        given["image"] = Image.open(folder / "first.png").convert("RGB")

    def drawn(kind: str) -> Any:
        x = torch.from_numpy(noise)
        if name in FLUX:
            return run_flux(pipe, x, kind, **given)
        how = {"guidance_scale_2": runs.GUIDANCE_2} if name.startswith("wan_a14b") else {}
        how |= {"num_inference_steps": runs.STEPS, "guidance_scale": runs.GUIDANCE}
        how |= {"return_dict": False, "output_type": kind, **runs.size_of(name)}
        return pipe(latents=x, **given, **how)[0]

    return drawn("latent").numpy(), np.asarray(drawn("np"))[0] * 255


def ours(name: str, folder: Path, *words: str) -> np.ndarray:
    """Sample with our command; return the latents."""
    text = [f"text_tokens={runs.FLUX_TEXT}"] if name in FLUX else []
    files = ("--noise", folder / "noise.safetensors", "--out", folder / "out")
    return run(folder, name, *files, *words, *text)


def options(name: str, folder: Path, negative: str | None) -> list[str]:
    image = ["--image", str(folder / "first.png")] if name in WITH_IMAGE else []
    return ["--prompt", PROMPT, *(["--negative-prompt", negative] if negative else []), *image]


@pytest.mark.parametrize(
    ("name", "negative"),
    [(name, None if name == "flux_schnell" else NEGATIVE) for name in BUILD] + [("sdxl", None)],
)
def test_from_prompt_to_pixels(name: str, negative: str | None, tmp_path: Path) -> None:
    latents, pixels = theirs(name, tmp_path, negative)
    got = ours(name, tmp_path, *options(name, tmp_path, negative))
    hold(f"{name}, latents", {"": got}, {"": latents}, 1e-4)
    if name in PICTURES:
        written = np.asarray(Image.open(tmp_path / "out" / "000.png"))
    else:
        from maxattn_examples.wan import torch_parts

        written = torch_parts.decode(tmp_path, got, "cpu")[0]
        video = "000.mp4" if find_ffmpeg() else "000"
        assert [path.name for path in (tmp_path / "out").iterdir()] == [video]
    again = [str(tmp_path / x) for x in ("", "latents.safetensors", "2")]
    decode.main(decode.arguments_of([*again[:2], "--out", again[2]]))
    found = (sorted(x for x in (tmp_path / y).rglob("*") if x.is_file()) for y in ("out", "2"))
    for one, other in zip(*found, strict=True):
        assert one.read_bytes() == other.read_bytes(), "decoding the latents gives the same file"
    assert written.shape == pixels.shape
    off = np.abs(written - pixels).max()
    print(f"{name}, pixels: at most {off:.2f} of 255 levels")
    assert off <= 1.0, "half a level of rounding, and the error of the latents"


def encoded(folder: Path, *words: str) -> tuple[str, str]:
    """Encode prompts with our command; return the option that names the file."""
    file = str(folder / "embeddings.safetensors")
    embed.main(embed.arguments_of([str(folder), *words, "--to", file]))
    return "--embeddings", file


@pytest.mark.parametrize("name", ["wan_i2v", "sdxl", "flux"])
def test_an_embeddings_file_replaces_the_prompt(name: str, tmp_path: Path) -> None:
    latents, _ = theirs(name, tmp_path, NEGATIVE)
    size = (f"--{key.removeprefix('num_')}={value}" for key, value in runs.VIDEO.items())
    text = [f"--text-tokens={runs.FLUX_TEXT}"] if name in FLUX else []
    file = encoded(tmp_path, *options(name, tmp_path, NEGATIVE), *size, *text)
    hold(f"{name}, latents", {"": ours(name, tmp_path, *file)}, {"": latents}, 1e-4)


def test_prompts_of_a_file_are_a_batch(tmp_path: Path) -> None:
    latents, _ = theirs("wan", tmp_path, NEGATIVE)
    (tmp_path / "prompts.txt").write_text(f"a cat\n\n{PROMPT}\n")
    prompts = ("--prompts", str(tmp_path / "prompts.txt"), "--negative-prompt", NEGATIVE)
    file = encoded(tmp_path, *prompts)
    assert load_file(file[1])["text"].shape == (2, 512, 8)
    noise = load_file(tmp_path / "noise.safetensors")["noise"]
    save_file({"noise": np.concatenate([noise, noise])}, tmp_path / "noise.safetensors")
    got = ours("wan", tmp_path, *file)
    hold("wan, latents", {"": got[1:]}, {"": latents}, 1e-4)
    assert np.abs(got[0] - got[1]).max() > 1e-2, "the prompts differ, and so do the videos"
