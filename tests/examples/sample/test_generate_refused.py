"""Sampling from folders: what cannot be drawn is said before anything is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxattn.errors import ConfigError, WeightsError
from tests.fixtures import make_diffusers as made
from tests.fixtures import make_pipelines as runs
from tests.golden_text import check_golden

from .pipelines import EXACT, draw, pipeline, sizes_of, told


def spoiled(folder: Path, **arrays: np.ndarray | None) -> None:
    """Change arrays of the embeddings file; None leaves one out."""
    held = load_file(folder / "told.safetensors") | arrays
    save_file(
        {key: value for key, value in held.items() if value is not None},
        folder / "told.safetensors",
    )


def stand_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, which: str, index: dict[str, Any]
) -> None:
    """Go to a pipeline with this index, and with prompts that are encoded."""
    told(folder, name)
    pipeline(folder, name, which)
    monkeypatch.chdir(folder)
    Path("model_index.json").write_text(json.dumps(index))


OUT, TOLD = ("--latents", "out.safetensors"), ("--embeddings", "told.safetensors")
PROMPT = ("--prompt", "a fox")
WRONG = {
    "nothing_said": ("wan", ()),
    "prompt_and_file": ("wan", (*PROMPT, *TOLD, *OUT)),
    "sizes": ("wan", (*TOLD, *OUT, "--height", "40", "--frames", "8")),
    "sizes_sdxl": ("sdxl", (*TOLD, *OUT, "--width", "12")),
    "image_missing": ("wan_i2v", (*PROMPT, *OUT)),
    "image_unwanted": ("wan", (*PROMPT, *OUT, "--image", "first.png")),
    "file_for_another_model": ("wan_i2v", (*TOLD, *OUT)),
    "file_missing": ("wan", ("--embeddings", "gone.safetensors", *OUT)),
    "noise_of_another_size": (
        "wan",
        (*TOLD, *OUT, "--noise", "noise.safetensors", "--width", "64"),
    ),
    "nowhere_to_write": (
        "wan",
        (*TOLD, "--latents", "told.safetensors/x", "--out", "told.safetensors"),
    ),
    "sampler": ("sdxl", (*TOLD, *OUT, "num_inference_steps=2000")),
    "lora_missing": ("wan", (*TOLD, *OUT, "--lora", "gone.safetensors", "--lora-scale", "nan")),
    "lora_scale_alone": ("sdxl", (*TOLD, *OUT, "--lora-scale", "0.5")),
    "lora_that_is_none": ("sdxl", (*TOLD, *OUT, "--lora", "scheduler")),
    "weights_missing": ("flux", (*TOLD, *OUT, "--weights", "gone")),
    "blocks": ("wan", (*TOLD, *OUT, "rollout.window=3")),
    "negative_and_file": ("wan", (*TOLD, *OUT, "--negative-prompt", "a dog")),
    "negative_unguided": ("flux", (*PROMPT, *OUT, "--negative-prompt", "a dog")),
    "flux_sizes": ("flux", (*TOLD, *OUT, "--width", "18")),
    "flux_guidance": ("flux_schnell", (*TOLD, *OUT, "guidance_scale=2")),
    "flux_true_cfg": ("flux_schnell", (*TOLD, *OUT, "guidance_scale=null", "true_cfg_scale=2")),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_drawn_is_said_first(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arguments = WRONG[case]
    told(tmp_path, "wan" if case == "file_for_another_model" else name)
    pipeline(tmp_path, name, next(iter(runs.SCHEDULERS[name])))
    if case == "file_for_another_model":
        spoiled(
            tmp_path,
            text=np.ones((3, 7, 9), np.float32),
            negative_text=None,
            pooled=np.ones((2, 5), np.float32),
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sample.checks.find_spec", lambda name: object())
    with pytest.raises(ConfigError) as error:
        draw(name, "--model", ".", *EXACT, *sizes_of(name), *arguments)
    check_golden(f"generate/{case}", str(error.value))
    assert not (tmp_path / "out.safetensors").exists()


def test_without_torch_both_ways_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline(tmp_path, "wan", "unipc")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sample.checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        draw("wan", "--model", ".", *sizes_of("wan"), *PROMPT, "--out", "out")
    check_golden("generate/without_torch", str(error.value))


def test_embed_and_decode_say_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import decode
    import embed

    pipeline(tmp_path, "sdxl", "euler")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sample.checks.find_spec", lambda name: None)
    Path("vae/config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    save_file({"latents": np.ones((1, 4, 3, 4, 6), np.float32)}, "latents.safetensors")
    asked = {
        "embed": (
            embed,
            "StableDiffusionXLPipeline",
            ["--prompts", "gone.txt", "--image", "gone.png", "--to", "file"],
        ),
        "embed_other": (embed, "StableDiffusion3Pipeline", ["--prompt", "a fox", "--to", "file"]),
        "decode": (decode, "StableDiffusionXLPipeline", ["latents.safetensors", "--out", "out"]),
    }
    for name, (command, kind, arguments) in asked.items():
        Path("model_index.json").write_text(json.dumps({"_class_name": kind}))
        with pytest.raises(ConfigError) as error:
            command.main(command.arguments_of([".", *arguments]))
        check_golden(f"generate/{name}", str(error.value))


def test_decode_and_embed_say_all_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import decode
    import embed

    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    texts = []
    for command, words in (
        (decode, ["nowhere", "gone.safetensors", "--out", "file"]),
        (embed, ["nowhere", "--prompt", "a fox", "--to", "file/x"]),
    ):
        with pytest.raises(ConfigError) as error:
            command.main(command.arguments_of(words))
        texts.append(str(error.value))
    check_golden("generate/not_there", "\n\n".join(texts))


@pytest.mark.parametrize("name", ["wan", "sdxl"])
def test_a_model_s_folder_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.folder: .*nowhere\n.*nothing is downloaded\n.*hf download"
    ):
        draw(name, "--model", tmp_path / "nowhere", *PROMPT, "--out", tmp_path / "out")


SMALL = [f"model.{key}={value}" for key, value in made.MODEL.items()]
A14B_REFUSALS = {
    "one_of_two": ("wan_a14b", {"boundary_ratio": None}, ()),
    "second_guidance": ("wan", {}, ("sampling.guidance_scale_2=3",)),
    "guidance_of_one": ("wan_a14b", {}, ("guidance_scale=1", "guidance_scale_2=3")),
    "second_lora": ("wan", {}, ("--lora-2", "told.safetensors")),
    "weights_of_one": ("wan_a14b", {}, ("--weights", "transformer")),
    "named_two": ("wan_ti2v", {}, ("model.sizes=wan-2.2-t2v-a14b", *SMALL)),
    "named_one": ("wan_a14b", {}, ("model.sizes=wan-2.1-t2v-14b", *SMALL)),
}  # fmt: skip


@pytest.mark.parametrize("case", A14B_REFUSALS)
def test_what_two_transformers_are_not_told(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, index, words = A14B_REFUSALS[case]
    stand_in(tmp_path, monkeypatch, name, "unipc", runs.INDEX.get(name, {}) | index)
    files = ("--embeddings", "told.safetensors", "--latents", "out.safetensors")
    with pytest.raises(ConfigError) as error:
        draw(name, "--model", ".", *EXACT, *sizes_of(name), *files, *words)
    check_golden(f"generate/{case}", str(error.value))


def test_models_that_are_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {
        "_class_name": "WanPipeline",
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
        "boundary_ratio": 0.9,
    }
    stand_in(tmp_path, monkeypatch, "wan", "unipc", two)
    with pytest.raises(ConfigError) as error:
        draw("wan", "--model", ".", *sizes_of("wan"), *TOLD, *OUT)
    check_golden("generate/two_transformers", str(error.value))
    Path("model_index.json").unlink()
    with pytest.raises(
        ConfigError, match=r"sampling\.compiler_options: xla_none=1\n.*No such compile option"
    ):
        draw(
            "wan",
            "--model",
            ".",
            *sizes_of("wan"),
            *TOLD,
            *OUT,
            "sampling.compiler_options=[xla_none=1]",
        )
    two_images = (
        json.loads(Path("transformer/config.json").read_text())
        | made.IMAGE
        | {"pos_embed_seq_len": 10}
    )
    Path("transformer/config.json").write_text(json.dumps(two_images))
    with pytest.raises(ConfigError, match="first and last frame"):
        draw("wan", "--model", ".", *sizes_of("wan"), *TOLD, *OUT)
    shutil.rmtree("transformer")
    shutil.rmtree("scheduler")
    pipeline(Path(), "wan", "unipc")
    ones = {"A": np.ones((2, 24), np.float32), "B": np.ones((24, 2), np.float32)}
    layer = "transformer.blocks.9.attn1.to_q"
    save_file({f"{layer}.lora_{side}.weight": x for side, x in ones.items()}, "lora.safetensors")
    with pytest.raises(ConfigError, match=r"blocks\.9\.attn1\.to_q"):
        draw("wan", "--model", ".", *sizes_of("wan"), *TOLD, *OUT, "--lora", "lora.safetensors")
    shutil.rmtree("transformer")
    with pytest.raises(WeightsError, match=r"config\.json"):
        draw("wan", "--model", ".", *sizes_of("wan"), *TOLD, *OUT)


@pytest.mark.parametrize("which", ["model", "weights"])
def test_a_model_of_blocks_is_not_drawn_from_at_once(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(tmp_path, "wan")
    pipeline(tmp_path, "wan", "unipc")
    shutil.copytree(tmp_path / "transformer", tmp_path / "run" / "transformer")
    path = tmp_path / ("run/transformer" if which == "weights" else "transformer") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"frames_per_block": 3}))
    monkeypatch.chdir(tmp_path)
    more = ("--weights", "run") if which == "weights" else ()
    with pytest.raises(ConfigError) as error:
        draw("wan", "--model", ".", *EXACT, *sizes_of("wan"), *TOLD, *OUT, *more)
    check_golden(f"generate/blocks_of_{which}", str(error.value))
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(("name", "of"), [("flux", "wan"), ("wan", "flux"), ("flux", "sdxl")])
def test_a_folder_of_another_family_is_refused(
    name: str, of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(tmp_path, name)
    pipeline(tmp_path, of, next(iter(runs.SCHEDULERS[of])))
    monkeypatch.chdir(tmp_path)
    if of == "sdxl":
        Path("model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    with pytest.raises(WeightsError) as error:
        draw(name, "--model", ".", *TOLD, *OUT)
    check_golden(f"generate/{name}_from_{of}", str(error.value))


def test_the_pipelines_of_other_flux_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = {"_class_name": "FluxKontextPipeline"}
    stand_in(tmp_path, monkeypatch, "flux", "flow_euler", index)
    with pytest.raises(ConfigError) as error:
        draw("flux", "--model", ".", *EXACT, *sizes_of("flux"), *TOLD, *OUT)
    check_golden("generate/flux_of_another_pipeline", str(error.value))


def test_lora_of_another_family_is_refused_before_a_prompt_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = {"A": np.ones((2, 24), np.float32), "B": np.ones((24, 2), np.float32)}
    layer = "transformer.blocks.1.attn1.to_q"
    tensors = {f"{layer}.lora_{side}.weight": x for side, x in sides.items()}
    save_file(tensors, tmp_path / "lora.safetensors")
    pipeline(tmp_path / "flux", "flux", "flow_euler")
    for part in ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"):
        (tmp_path / "flux" / part).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sample.checks.find_spec", lambda name: object())
    monkeypatch.setattr("flux.torch_parts.texts", lambda *_: pytest.fail("a prompt was encoded"))
    words = ("--model", "flux", *sizes_of("flux"), *PROMPT, *OUT, "--lora", "lora.safetensors")
    with pytest.raises(ConfigError) as error:
        draw("flux", *words)
    check_golden("generate/flux_lora_of_wan", str(error.value))
    save_file({name.replace("blocks", "layers"): x for name, x in tensors.items()}, words[-1])
    with pytest.raises(ConfigError, match=r"layers\.1\.attn1"):
        draw("flux", *words)


def test_the_small_model_takes_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--embeddings: .*\n.*forty prompts"):
        draw("demo", *TOLD)
    with pytest.raises(ConfigError, match=r"model\.folder: null"):
        draw("wan", *PROMPT, "model.sizes=wan-2.1-t2v-1.3b")
