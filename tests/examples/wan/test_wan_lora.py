"""LoRA of Wan under the names of those who publish it, merged and compared with float64."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx
from wan.model import WanTransformer3D
from wan.sizes import Sizes

from maxattn import weights
from maxattn.weights import layer_names
from tests.examples.published_lora import SCALE, Names, check, check_names, drawn, filled
from tests.fixtures import make_diffusers as made

# Wan's names of layers and diffusers', as both write them; {i} is a block.
BLOCK = {
    "self_attn.q": "attn1.to_q",
    "self_attn.k": "attn1.to_k",
    "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v",
    "cross_attn.o": "attn2.to_out.0",
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
OUTSIDE = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "head.head": "proj_out",
    "patch_embedding": "patch_embedding",
}
LAYERS = OUTSIDE | {
    f"blocks.{i}.{own}": f"blocks.{i}.{theirs}" for i in range(2) for own, theirs in BLOCK.items()
}
# Changes that lightx2v saves whole, not as two matrices: Wan's name and diffusers'.
DIFFERENCES = {
    "blocks.1.self_attn.q.diff_b": "blocks.1.attn1.to_q.bias",
    "blocks.0.self_attn.norm_k.diff": "blocks.0.attn1.norm_k.weight",
    "blocks.1.cross_attn.norm_k_img.diff": "blocks.1.attn2.norm_added_k.weight",
    "blocks.0.norm3.diff": "blocks.0.norm2.weight",
    "blocks.0.norm3.diff_b": "blocks.0.norm2.bias",
    "blocks.1.modulation.diff": "blocks.1.scale_shift_table",
    "head.modulation.diff": "scale_shift_table",
    "img_emb.proj.0.diff": "condition_embedder.image_embedder.norm1.weight",
    "img_emb.proj.4.diff_b": "condition_embedder.image_embedder.norm2.bias",
    "head.head.diff_b": "proj_out.bias",
}


def model() -> WanTransformer3D:
    """Build an image-to-video model of two layers with random weights."""
    sizes = Sizes(**(made.MODEL | made.IMAGE))
    return filled(nnx.eval_shape(lambda: WanTransformer3D(sizes, rngs=nnx.Rngs(0))))


def names_in(style: str, own: str, theirs: str) -> tuple[Names, str]:
    """Return the names of a layer, and the prefix of all."""
    flat = f"lora_unet_{own.replace('.', '_')}"
    down, up = ("lora_A", "lora_B") if style in ("comfy", "diffusers") else ("lora_down", "lora_up")
    named = {"musubi": (flat, "lora_unet_"), "diffusers": (f"transformer.{theirs}", "transformer.")}
    layer, prefix = named.get(style, (f"diffusion_model.{own}", "diffusion_model."))
    return (f"{layer}.{down}.weight", f"{layer}.{up}.weight", f"{layer}.alpha"), prefix


STYLES = {"comfy": None, "comfy with alpha": 1.5, "lightx2v": 6.0, "musubi": 1.0, "diffusers": None}


@pytest.mark.parametrize("style", STYLES)
def test_published_names_are_merged(style: str) -> None:
    video, alpha = model(), STYLES[style]
    before = weights.to_diffusers(video)
    named = {theirs: names_in(style.split()[0], own, theirs) for own, theirs in LAYERS.items()}
    names = {layer: x for layer, (x, _) in named.items()}
    given, want = drawn(before, names, 3, alpha)
    assert {weights.lora_prefix(video, given)} == {prefix for _, prefix in named.values()}
    assert sorted(weights.merge_lora(video, given, SCALE)) == sorted(LAYERS.values())
    check(video, before, want)


def test_differences_of_lightx2v_are_added() -> None:
    video, rng = model(), np.random.default_rng(1)
    before, given, want = weights.to_diffusers(video), {}, {}
    for own, theirs in DIFFERENCES.items():
        given[f"diffusion_model.{own}"] = rng.normal(size=before[theirs].shape).astype(np.float32)
        change = 0.5 * given[f"diffusion_model.{own}"].astype(np.float64)
        want[theirs] = before[theirs].astype(np.float64) + change
    weights.merge_lora(video, given, 0.5)
    check(video, before, want)


def test_every_name_is_of_one_layer() -> None:
    assert check_names(model(), layer_names.wan) == {"patch_embedding"}
