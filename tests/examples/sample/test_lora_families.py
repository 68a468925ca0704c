"""LoRA weights of another family are named as such, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sample.lora_checks import family_of

from maxattn.errors import ConfigError
from tests.fixtures import make_pipelines as runs
from tests.golden_text import check_golden

from .pipelines import draw, pipeline, sizes_of, told

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
NONE = ("text_encoder.layers.0.q.lora_A.weight", "lora_te1_text_model_encoder.alpha", "layers.0.q")


@pytest.mark.parametrize("family", NAMES)
def test_a_family_is_known_by_the_names_of_its_layers(family: str) -> None:
    for name in NAMES[family]:
        assert family_of([*NONE, name]) == (family, name)
    assert family_of(NONE) is None


@pytest.mark.parametrize("given", NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_another_family_are_refused(
    name: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == given:
        return
    _, options = told(tmp_path, name)
    pipeline(tmp_path, name, next(iter(runs.SCHEDULERS[name])))
    monkeypatch.chdir(tmp_path)
    save_file({NAMES[given][0]: np.ones((2, 4), np.float32)}, "lora.safetensors")
    words = ("--model", ".", *sizes_of(name), *options, "--latents", "out.safetensors")
    more = ("true_cfg_scale=2",) if name == "flux" else ()
    with pytest.raises(ConfigError) as error:
        draw(name, *words, *more, "--lora", "lora.safetensors")
    check_golden(f"generate/lora_{name}_from_{given}", str(error.value))
