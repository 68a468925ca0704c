"""Sampling refuses bad input before it reads weights; messages: golden/generate.txt."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from maxattn_examples.sample.torch_parts import device_errors
from maxattn_examples.sample.weights import family_of
from safetensors.numpy import load_file, save_file

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, WeightsError
from tests.fixtures import make_diffusers as made
from tests.fixtures import make_pipelines as runs
from tests.golden_text import check_golden, check_refused

from .pipelines import EXACT, draw, pipeline, sizes_of, told

FILE, INDEX = "diffusion_pytorch_model.safetensors", Path("model_index.json")
OUT, TOLD = ("--latents", "out.safetensors"), ("--embeddings", "told.safetensors")
BOTH, PROMPT, NOISE = (*TOLD, *OUT), ("--prompt", "a fox"), "noise.safetensors"
SMALL = [f"model.{key}={value}" for key, value in made.MODEL.items()]
RUN, PART = (*BOTH, "--weights", "run"), "transformer"
HYPER = ("num_inference_steps=8", "guidance_scale=3.5", "true_cfg_scale=1")
TWO = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.9}


class Case(NamedTuple):
    """A pipeline, the command's arguments, and a change of the current folder."""

    name: str
    words: tuple[str, ...] = BOTH
    change: Callable[[], Any] = lambda: None


# ---- changed folders -----------------------------------------------------------------------------


def change_json(path: Path | str, **changes: Any) -> None:
    """Change keys of a JSON file, which may not exist; None removes the key."""
    path = Path(path)
    values = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({k: x for k, x in values.items() if x is not None}))


def indexed(name: str, **changes: Any) -> Case:
    return Case(name, change=lambda: change_json(INDEX, **changes))


def sized(name: str, **changes: Any) -> Case:
    return Case(name, change=lambda: change_json("transformer/config.json", **changes))


def embeddings_of_another_model() -> None:
    told(Path(), "wan")
    arrays = load_file("told.safetensors")
    del arrays["negative_text"]
    arrays |= {"text": np.ones((3, 7, 9), np.float32), "pooled": np.ones((2, 5), np.float32)}
    save_file(arrays, "told.safetensors")


def spoiled(file: str, name: str) -> None:
    arrays = load_file(file)
    arrays[name].flat[:2] = np.nan, np.inf
    save_file(arrays, file)


def without_a_tensor(part: str, to: str = "") -> None:
    tensors = load_file(Path(part) / FILE)
    del tensors["blocks.1.attn1.to_q.weight"]
    Path(to, part).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(to, part, FILE))


def without_first_part() -> None:
    change_json(INDEX, transformer=["diffusers", "WanTransformer3DModel"])
    shutil.rmtree("transformer")


def weights_of_blocks() -> None:
    shutil.copytree("transformer", "run/transformer")
    change_json("run/transformer/config.json", frames_per_block=3)


def replaced(name: str, by: str, kind: str | None = None) -> Case:
    """Sample from the folder of another model."""

    def change() -> None:
        for part in ("transformer", "scheduler", "vae"):
            shutil.rmtree(part, ignore_errors=True)
        pipeline(Path(), by, next(iter(runs.SCHEDULERS[by])))
        change_json(INDEX, _class_name=kind)

    return Case(name, change=change)


def weights_of(name: str, given: str, folder: str = "other") -> Case:
    """Sample with the weights of another model's pipeline."""

    def change() -> None:
        pipeline(Path("other"), given, next(iter(runs.SCHEDULERS[given])))
        for place, its in ((Path(), name), (Path("other"), given)):
            kind = "FluxPipeline" if its == "flux" else "WanPipeline"
            change_json(place / INDEX, _class_name=kind)

    return Case(name, (*BOTH, "--weights", folder), change)


def lora(
    name: str, layer: str, size: int = 24, option: str = "--lora", prompt: bool = False
) -> Any:
    """Sample with LoRA weights of one layer; with `prompt`, folders must not be read."""

    def change() -> None:
        sides = {"A": np.ones((2, size), np.float32), "B": np.ones((24, 2), np.float32)}
        tensors = {f"{layer}.lora_{side}.weight": x for side, x in sides.items()}
        save_file(tensors, "lora.safetensors")
        for part in ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"):
            Path(part).mkdir() if prompt else None

    return Case(name, (*(PROMPT if prompt else TOLD), *OUT, option, "lora.safetensors"), change)


def lora_2(layer: str, size: int = 24) -> Case:
    return lora("wan_a14b", layer, size, "--lora-2")


NAMES = {
    "wan": (
        "transformer.blocks.0.attn1.to_q.lora_A.weight",
        "diffusion_model.blocks.3.self_attn.q.lora_A.weight",
        "blocks.12.ffn.0.lora_down.weight",
        "lora_unet_blocks_0_cross_attn_k.lora_down.weight",
    ),
    "sdxl": (
        "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight",
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_k.lora_down.weight",
        "lora_unet_mid_block_attentions_0_transformer_blocks_3_attn2_to_v.lora_up.weight",
        "lora_unet_output_blocks_0_1_proj_in.alpha",
    ),
    "flux": (
        "transformer.single_transformer_blocks.7.attn.to_k.lora_B.weight",
        "transformer.transformer_blocks.0.attn.add_q_proj.lora_A.weight",
        "double_blocks.0.img_attn.qkv.lora_down.weight",
        "lora_unet_single_blocks_12_linear1.lora_down.weight",
    ),
}
NO_FAMILY = ("text_encoder.0.q.lora_A.weight", "lora_te1_text_model_encoder.alpha", "layers.0.q")


def lora_of_a_family(name: str, given: str) -> Case:
    tensors = {NAMES[given][0]: np.ones((2, 4), np.float32)}
    words = (*BOTH, "--lora", "lora.safetensors")
    return Case(name, words, lambda: save_file(tensors, "lora.safetensors"))


# ---- the cases, by the names of their messages ---------------------------------------------------

REFUSED = {
    "nothing_said": Case("wan", ()),
    "prompt_and_file": Case("wan", (*PROMPT, *BOTH)),
    "sizes": Case("wan", (*BOTH, "--height", "40", "--frames", "8")),
    "sizes_sdxl": Case("sdxl", (*BOTH, "--width", "12")),
    "image_missing": Case("wan_i2v", (*PROMPT, *OUT)),
    "image_unwanted": Case("wan", (*PROMPT, *OUT, "--image", "first.png")),
    "file_for_another_model": Case("wan_i2v", change=embeddings_of_another_model),
    "file_missing": Case("wan", ("--embeddings", "gone.safetensors", *OUT)),
    "noise_of_another_size": Case("wan", (*BOTH, "--noise", NOISE, "width=64")),
    "noise_not_finite": Case("wan", (*BOTH, "--noise", NOISE), lambda: spoiled(NOISE, "noise")),
    "embeddings_not_finite": Case("wan", change=lambda: spoiled("told.safetensors", "text")),
    "nowhere_to_write": Case("wan", (*TOLD, "--latents", f"{TOLD[1]}/x", "--out", TOLD[1])),
    "sampler": Case("sdxl", (*BOTH, "num_inference_steps=2000")),
    "weights_missing": Case("flux", (*BOTH, "--weights", "gone")),
    "blocks": Case("wan", (*BOTH, "rollout.window=3")),
    "negative_and_file": Case("wan", (*BOTH, "--negative-prompt", "a dog")),
    "negative_unguided": Case("flux", (*PROMPT, *OUT, "--negative-prompt", "a dog")),
    "flux_sizes": Case("flux", (*BOTH, "--width", "18")),
    "flux_guidance": Case("flux_schnell", (*BOTH, "guidance_scale=2")),
    "flux_true_cfg": Case("flux_schnell", (*BOTH, "guidance_scale=null", "true_cfg_scale=2")),
    "schnell_that_is_dev": Case("flux", (*BOTH, "distilled=schnell", "guidance_scale=null")),
    "hyper_flux_that_is_schnell": Case("flux_schnell", (*BOTH, "distilled=hyper_flux", *HYPER)),
    # two transformers
    "one_of_two": indexed("wan_a14b", boundary_ratio=None),
    "second_guidance": Case("wan", (*BOTH, "sampling.guidance_scale_2=3")),
    "guidance_of_one": Case("wan_a14b", (*BOTH, "guidance_scale=1", "guidance_scale_2=3")),
    "second_lora": Case("wan", (*BOTH, "--lora-2", "told.safetensors")),
    "weights_of_one": Case("wan_a14b", (*BOTH, "--weights", "transformer")),
    "named_two": Case("wan_ti2v", (*BOTH, "model.sizes=wan-2.2-t2v-a14b", *SMALL)),
    "named_one": Case("wan_a14b", (*BOTH, "model.sizes=wan-2.1-t2v-14b", *SMALL)),
    "two_transformers": indexed("wan", _class_name="WanPipeline", **TWO),
    # a folder that is not whole
    "fit_second_lacks_a_tensor": Case("wan_a14b", change=lambda: without_a_tensor("transformer_2")),
    "fit_weights_lack_a_tensor": Case("wan_a14b", RUN, lambda: without_a_tensor(PART, "run")),
    "fit_two_without_an_index": Case("wan_a14b", change=INDEX.unlink),
    "fit_second_is_gone": Case("wan_a14b", change=lambda: shutil.rmtree("transformer_2")),
    "fit_first_is_gone": Case("wan_a14b", change=without_first_part),
    "fit_expand_timesteps_in_words": indexed("wan_a14b", expand_timesteps="false"),
    "no_sizes": Case("wan", change=Path("transformer/config.json").unlink),
    # the folder or the weights of another model
    "two_images": sized("wan", **made.IMAGE, pos_embed_seq_len=10),
    "blocks_of_model": sized("wan", frames_per_block=3),
    "blocks_of_weights": Case("wan", RUN, weights_of_blocks),
    "flux_from_wan": replaced("flux", "wan"),
    "wan_from_flux": replaced("wan", "flux"),
    "flux_from_sdxl": replaced("flux", "sdxl", "StableDiffusionXLPipeline"),
    "flux_of_another_pipeline": indexed("flux", _class_name="FluxKontextPipeline"),
    "weights_of_two_for_one": weights_of("wan", "wan_a14b"),
    "weights_of_one_for_two": weights_of("wan_a14b", "wan"),
    "weights_of_flux": weights_of("wan", "flux"),
    "weights_of_a_flux_transformer": weights_of("wan", "flux", "other/transformer"),
    # LoRA
    "lora_missing": Case("wan", (*BOTH, "--lora", "gone.safetensors", "--lora-scale", "nan")),
    "lora_scale_alone": Case("sdxl", (*BOTH, "--lora-scale", "0.5")),
    "lora_that_is_none": Case("sdxl", (*BOTH, "--lora", "scheduler")),
    "lora_of_more_blocks": lora("wan", "transformer.blocks.9.attn1.to_q"),
    "fit_lora_2_of_more_blocks": lora_2("transformer.blocks.7.attn1.to_q"),
    "fit_lora_2_of_another_width": lora_2("transformer.blocks.1.attn1.to_q", size=32),
    "fit_lora_of_ltx": lora_2("transformer.transformer_blocks.0.attn1.to_q"),
    "fit_lora_of_image_to_video": lora_2("blocks.1.attn2.add_k_proj"),
    "flux_lora_of_wan": lora("flux", "transformer.blocks.1.attn1.to_q", prompt=True),
    "flux_lora_of_no_family": lora("flux", "transformer.layers.1.attn1.to_q", prompt=True),
} | {f"lora_{n}_from_{g}": lora_of_a_family(n, g) for n in NAMES for g in NAMES if n != g}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, words, change = REFUSED[message]
    monkeypatch.chdir(tmp_path)
    told(Path(), name)
    pipeline(Path(), name, next(iter(runs.SCHEDULERS[name])))
    monkeypatch.setattr("maxattn_examples.sample.torch_parts.find_spec", lambda name: object())
    monkeypatch.setattr(
        "maxattn_examples.sample.run.load", lambda *_: pytest.fail("weights were read")
    )
    monkeypatch.setattr(
        "maxattn_examples.flux.sampling.encode", lambda *_: pytest.fail("a prompt was encoded")
    )
    change()
    with pytest.raises((ConfigError, WeightsError)) as error:
        draw(name, "--model", ".", *EXACT, *sizes_of(name), *words)
    check_golden(f"generate/{message}", str(error.value))
    assert not Path("out.safetensors").exists()


@pytest.mark.parametrize("family", NAMES)
def test_a_family_is_known_by_the_names_of_its_layers(family: str) -> None:
    for name in NAMES[family]:
        assert family_of([*NO_FAMILY, name]) == (family, name)
    assert family_of(NO_FAMILY) is None


# ---- commands without torch or without their files -----------------------------------------------

PICTURES, OTHER = "StableDiffusionXLPipeline", "StableDiffusion3Pipeline"
# By the name of the message: the command, the class of its pipeline, and the words behind it.
WITHOUT_TORCH = {
    "embed": ("embed", PICTURES, ["--prompts", "gone.txt", "--image", "gone.png", "--to", "file"]),
    "embed_other": ("embed", OTHER, ["--prompt", "a fox", "--to", "file"]),
    "decode": ("decode", PICTURES, ["latents.safetensors", "--out", "out"]),
    "without_torch": ("wan", None, [*PROMPT, "--out", "out"]),
}


@pytest.mark.parametrize("message", WITHOUT_TORCH)
def test_without_torch(message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, kind, words = WITHOUT_TORCH[message]
    monkeypatch.chdir(tmp_path)
    pipeline(Path(), *(("sdxl", "euler") if kind else ("wan", "unipc")))
    monkeypatch.setattr("maxattn_examples.sample.torch_parts.find_spec", lambda name: None)
    if kind:
        change_json("vae/config.json", block_out_channels=None, _class_name="AutoencoderKL")
        change_json(INDEX, _class_name=kind)
    save_file({"latents": np.ones((1, 4, 3, 4, 6), np.float32)}, "latents.safetensors")
    check_refused(f"generate/{message}", ConfigError, lambda: run_command(command, *words))


def test_a_device_that_torch_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every command that uses torch refuses it before a model is loaded."""

    def zeros(_: int, device: str) -> None:
        raise RuntimeError(f"no device {device}.\nmore of torch's words")

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(zeros=zeros))
    monkeypatch.setattr("maxattn_examples.sample.torch_parts.find_spec", lambda _: object())
    monkeypatch.chdir(tmp_path)
    pipeline(Path(), "wan", "unipc")
    change_json(INDEX, _class_name="WanPipeline")
    for command, option, words in (
        ("decode", "--torch-device", ("l", "--out", "out", "--torch-device", "gpu:9")),
        ("embed", "--torch-device", (*PROMPT, "--to", "e", "--torch-device", "gpu:9")),
        ("wan", "sampling.torch_device", (*PROMPT, *OUT, "sampling.torch_device=gpu:9")),
    ):
        with pytest.raises(ConfigErrors) as error:
            run_command(command, *words)
        named = rf"{option}: gpu:9\n  rule .*and failed: no device gpu:9\n  remedy  use cpu"
        assert re.search(named, str(error.value))
    assert not list(device_errors("--torch-device", "cpu"))


def run_command(command: str, *words: str, folder: str = ".") -> None:
    if command == "wan":
        return draw("wan", "--model", folder, *sizes_of("wan"), *words)
    program = __import__(command)
    program.main(program.arguments_of([folder, *words]))


def test_decode_and_embed_name_every_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    texts = []
    for command, words in (
        ("decode", ("gone.safetensors", "--out", "file")),
        ("embed", ("--prompt", "a fox", "--to", "file/x")),
    ):
        with pytest.raises(ConfigError) as error:
            run_command(command, *words, folder="nowhere")
        texts.append(str(error.value))
    check_golden("generate/not_there", "\n\n".join(texts))


@pytest.mark.parametrize("name", ["wan", "sdxl"])
def test_a_missing_folder_of_a_model(name: str, tmp_path: Path) -> None:
    why = r"model\.folder: .*nowhere\n.*nothing is downloaded\n.*hf download"
    with pytest.raises(ConfigError, match=why):
        draw(name, "--model", tmp_path / "nowhere", *PROMPT, "--out", tmp_path / "out")


def test_an_option_that_the_compiler_refuses(tmp_path: Path) -> None:
    _, files = told(tmp_path, "wan")
    words = ("--latents", tmp_path / "out", "sampling.compiler_options=[xla_no=1]")
    with pytest.raises(ConfigError, match=r"compiler_options: xla_no=1\n.*No such compile option"):
        draw("wan", "--model", pipeline(tmp_path, "wan", "unipc"), *sizes_of("wan"), *files, *words)


def test_the_small_model_takes_no_files() -> None:
    with pytest.raises(ConfigError, match=r"--embeddings: .*\n.*forty prompts"):
        draw("demo", *TOLD)
    with pytest.raises(ConfigError, match=r"model\.folder: null"):
        draw("wan", *PROMPT, "model.sizes=wan-2.1-t2v-1.3b")
