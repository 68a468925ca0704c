"""Weights that do not fit are refused before a prompt is encoded or a step taken; messages:
golden/generate.txt.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxattn.errors import ConfigError
from tests.fixtures import make_pipelines as runs
from tests.golden_text import check_golden

from .pipelines import EXACT, MORE, draw, pipeline, sizes_of, told

FILE = "diffusion_pytorch_model.safetensors"
INDEX = Path("model_index.json")


def without_a_tensor(part: str, to: str = "") -> None:
    path = Path(to or part) / FILE
    tensors = load_file(Path(part) / FILE)
    del tensors["blocks.1.attn1.to_q.weight"]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def said(**changes: Any) -> None:
    INDEX.write_text(json.dumps(json.loads(INDEX.read_text()) | changes))


def no_index() -> None:
    INDEX.unlink()


def no_first_part() -> None:
    said(transformer=["diffusers", "WanTransformer3DModel"])
    shutil.rmtree("transformer")


def lora(layer: str, *, size: int = 24) -> None:
    sides = {"A": np.ones((2, size), np.float32), "B": np.ones((24, 2), np.float32)}
    tensors = {f"{layer}.lora_{side}.weight": x for side, x in sides.items()}
    save_file(tensors, "lora.safetensors")


LORA_2 = ("--lora-2", "lora.safetensors")
# What is wrong with a folder of A14B, and what is written behind the command.
BAD: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "second_lacks_a_tensor": (lambda: without_a_tensor("transformer_2"), ()),
    "weights_lack_a_tensor": (
        lambda: without_a_tensor("transformer", "run/transformer"),
        ("--weights", "run"),
    ),
    "two_without_an_index": (no_index, ()),
    "second_is_gone": (lambda: shutil.rmtree("transformer_2"), ()),
    "first_is_gone": (no_first_part, ()),
    "expand_timesteps_in_words": (lambda: said(expand_timesteps="false"), ()),
    "lora_2_of_more_blocks": (lambda: lora("transformer.blocks.7.attn1.to_q"), LORA_2),
    "lora_2_of_another_width": (
        lambda: lora("transformer.blocks.1.attn1.to_q", size=32),
        LORA_2,
    ),
    "lora_of_ltx": (lambda: lora("transformer.transformer_blocks.0.attn1.to_q"), LORA_2),
    "lora_of_image_to_video": (lambda: lora("blocks.1.attn2.add_k_proj"), LORA_2),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_before_a_step(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, options = told(tmp_path, "wan_a14b")
    pipeline(tmp_path, "wan_a14b", next(iter(runs.SCHEDULERS["wan_a14b"])))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sample.run.load", lambda *_: pytest.fail("weights were read"))
    change, more = BAD[case]
    change()
    words = (*EXACT, *MORE["wan_a14b"], *sizes_of("wan_a14b"), *options)
    with pytest.raises(ConfigError) as error:
        draw("wan_a14b", "--model", ".", *words, "--latents", "out.safetensors", *more)
    check_golden(f"generate/fit_{case}", str(error.value).replace(str(tmp_path), "."))
