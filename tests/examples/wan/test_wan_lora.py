"""LoRA of Wan under the names of those who publish it, merged and held to sums in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx
from wan.model import WanTransformer3D
from wan.sizes import Sizes

from maxattn import weights
from maxattn.weights import layer_names
from maxattn.weights.layer_names import names_of
from maxattn.weights.names import entries
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
# As lightx2v saves what is no product of two matrices: Wan's name and diffusers'.
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
RANK = 3


def model() -> WanTransformer3D:
    """Build an image-to-video model of two layers, with numbers of its own."""
    sizes, rng = Sizes(**(made.MODEL | made.IMAGE)), np.random.default_rng(0)
    empty = nnx.eval_shape(lambda: WanTransformer3D(sizes, rngs=nnx.Rngs(0)))
    given = {e.name: rng.normal(size=e.shape).astype(np.float32) for e in entries(empty)}
    weights.load_diffusers(empty, given)
    return empty


def matrices(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng, (out, *inner) = np.random.default_rng(seed), shape
    down = rng.normal(size=(RANK, *inner)).astype(np.float32)
    return down, rng.normal(size=(out, RANK, *(1,) * (len(inner) - 1))).astype(np.float32)


def name_of(style: str, own: str, theirs: str) -> tuple[str, str, str, str]:
    """Return the names of A, B and alpha of a layer, and what all begin with."""
    flat = f"lora_unet_{own.replace('.', '_')}"
    down, up = ("lora_A", "lora_B") if style in ("comfy", "diffusers") else ("lora_down", "lora_up")
    named = {"musubi": (flat, "lora_unet_"), "diffusers": (f"transformer.{theirs}", "transformer.")}
    layer, begin = named.get(style, (f"diffusion_model.{own}", "diffusion_model."))
    return f"{layer}.{down}.weight", f"{layer}.{up}.weight", f"{layer}.alpha", begin


@pytest.mark.parametrize(
    ("style", "alpha"),
    [("comfy", None), ("comfy", 1.5), ("lightx2v", 6.0), ("musubi", 1.0), ("diffusers", None)],
)
def test_published_names_are_merged(style: str, alpha: float | None) -> None:
    video, given = model(), {}
    before, want = weights.to_diffusers(video), {}
    for seed, (own, theirs) in enumerate(LAYERS.items()):
        kernel = before[f"{theirs}.weight"]
        a, b, its_alpha, begin = name_of(style, own, theirs)
        given[a], given[b] = matrices(kernel.shape, seed)
        if alpha is not None:
            given[its_alpha] = np.float32(alpha)
        down, up = (given[x].astype(np.float64).reshape(len(given[x]), -1) for x in (a, b))
        change = 0.7 * (alpha or RANK) / RANK * (up @ down)
        want[f"{theirs}.weight"] = kernel.astype(np.float64) + change.reshape(kernel.shape)
    assert weights.lora_prefix(video, given) == begin
    assert sorted(weights.merge_lora(video, given, 0.7)) == sorted(LAYERS.values())
    hold(weights.to_diffusers(video), before, want)


def hold(got: Any, before: Any, want: Any) -> None:
    for name, array in got.items():
        if name in want:
            np.testing.assert_allclose(array, want[name], rtol=2e-6, atol=2e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_differences_of_lightx2v_are_added() -> None:
    video, rng = model(), np.random.default_rng(1)
    before, given, want = weights.to_diffusers(video), {}, {}
    for own, theirs in DIFFERENCES.items():
        given[f"diffusion_model.{own}"] = rng.normal(size=before[theirs].shape).astype(np.float32)
        change = 0.5 * given[f"diffusion_model.{own}"].astype(np.float64)
        want[theirs] = before[theirs].astype(np.float64) + change
    weights.merge_lora(video, given, 0.5)
    hold(weights.to_diffusers(video), before, want)


def test_every_name_is_of_one_layer() -> None:
    names = names_of(model())
    own = {entry.removesuffix(".weight").removesuffix(".bias") for entry in names.entries}
    theirs = layer_names.wan(own)
    assert len(set(theirs.values())) == len(theirs)
    for layer, name in [*theirs.items(), *((layer, layer) for layer in own)]:
        assert names.layers[name] == names.layers[name.replace(".", "_")] == layer
    assert own - theirs.keys() == {"patch_embedding"}
