"""LoRA of SDXL in the format of kohya's sd-scripts, with convolutions, compared with float64."""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import pytest
from flax import nnx
from maxattn_examples.sdxl.settings import Sizes
from maxattn_examples.sdxl.unet import UNet

from maxattn import weights
from maxattn.weights import layer_names
from tests.examples.published_lora import SCALE, check, check_names, drawn, filled

# SDXL's own numbers of blocks, each narrow.
SIZES = Sizes(
    block_out_channels=(4, 8, 8),
    transformer_layers_per_block=(1, 2, 3),
    attention_head_dim=(1, 2, 2),
    cross_attention_dim=8,
    addition_time_embed_dim=4,
    projection_class_embeddings_input_dim=30,
    norm_num_groups=2,
)
# Stability's names as sd-scripts write them, and diffusers': from real files and both codes.
LAYERS = {
    "input_blocks_0_0": "conv_in",
    "input_blocks_1_0_in_layers_2": "down_blocks.0.resnets.0.conv1",
    "input_blocks_2_0_emb_layers_1": "down_blocks.0.resnets.1.time_emb_proj",
    "input_blocks_3_0_op": "down_blocks.0.downsamplers.0.conv",
    "input_blocks_4_0_skip_connection": "down_blocks.1.resnets.0.conv_shortcut",
    "input_blocks_4_1_proj_in": "down_blocks.1.attentions.0.proj_in",
    "input_blocks_5_1_transformer_blocks_1_attn1_to_q": (
        "down_blocks.1.attentions.1.transformer_blocks.1.attn1.to_q"
    ),
    "input_blocks_6_0_op": "down_blocks.1.downsamplers.0.conv",
    "input_blocks_7_1_transformer_blocks_2_attn2_to_out_0": (
        "down_blocks.2.attentions.0.transformer_blocks.2.attn2.to_out.0"
    ),
    "input_blocks_8_0_out_layers_3": "down_blocks.2.resnets.1.conv2",
    "middle_block_0_in_layers_2": "mid_block.resnets.0.conv1",
    "middle_block_1_transformer_blocks_0_ff_net_0_proj": (
        "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj"
    ),
    "middle_block_2_out_layers_3": "mid_block.resnets.1.conv2",
    "output_blocks_0_1_transformer_blocks_0_attn2_to_k": (
        "up_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k"
    ),
    "output_blocks_2_2_conv": "up_blocks.0.upsamplers.0.conv",
    "output_blocks_3_1_proj_out": "up_blocks.1.attentions.0.proj_out",
    "output_blocks_5_1_transformer_blocks_1_ff_net_2": (
        "up_blocks.1.attentions.2.transformer_blocks.1.ff.net.2"
    ),
    "output_blocks_5_2_conv": "up_blocks.1.upsamplers.0.conv",
    "output_blocks_8_0_skip_connection": "up_blocks.2.resnets.2.conv_shortcut",
    "time_embed_2": "time_embedding.linear_2",
    "label_emb_0_0": "add_embedding.linear_1",
    "out_2": "conv_out",
}
NAMES = {
    "stability": {layer: f"lora_unet_{own}" for own, layer in LAYERS.items()},
    "flat": {layer: f"lora_unet_{layer.replace('.', '_')}" for layer in LAYERS.values()},
    "diffusers": {layer: f"unet.{layer}" for layer in LAYERS.values()},
}


@cache
def shapes() -> UNet:
    return nnx.eval_shape(lambda: UNet(SIZES, rngs=nnx.Rngs(0)))


@pytest.mark.slow
@pytest.mark.parametrize("style", NAMES)
def test_published_names_are_merged(style: str, caplog: pytest.LogCaptureFixture) -> None:
    model = filled(nnx.clone(shapes()))
    before = weights.to_diffusers(model)
    down, up = ("lora_A", "lora_B") if style == "diffusers" else ("lora_down", "lora_up")
    ends = (f"{down}.weight", f"{up}.weight", "alpha")
    names = {layer: tuple(f"{x}.{end}" for end in ends) for layer, x in NAMES[style].items()}
    given, want = drawn(before, names, 2, 1.0)  # type: ignore[arg-type]
    text = {"lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": np.float32(1)}
    with caplog.at_level(logging.WARNING, "maxattn"):
        merged = weights.merge_lora(model, given | text, SCALE)
    assert sorted(merged) == sorted(LAYERS.values())
    assert "lora_te1_text_model" in caplog.text
    check(model, before, want)


@pytest.mark.slow
def test_every_name_is_of_one_layer() -> None:
    assert not check_names(shapes(), layer_names.unet)
