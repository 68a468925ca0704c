"""LoRA of Wan under the names of several publishers, merged and compared with float64."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.settings import Sizes

from maxattn import weights
from maxattn.errors import WeightsError
from maxattn.weights import layer_names
from tests.examples.published_lora import SCALE, Names, check, check_names, drawn, filled
from tests.examples.wan.test_original_names import THEIRS
from tests.fixtures import make_diffusers as made


def model() -> WanTransformer3D:
    """Build an image-to-video model of two layers with random weights."""
    sizes = Sizes(**(made.MODEL | made.IMAGE))
    return filled(nnx.eval_shape(lambda: WanTransformer3D(sizes, rngs=nnx.Rngs(0))))


def names_in(style: str, own: str, theirs: str) -> tuple[Names, str]:
    """Return the names of a layer, and their common prefix."""
    flat = f"lora_unet_{own.replace('.', '_')}"
    down, up = ("lora_A", "lora_B") if style in ("comfy", "diffusers") else ("lora_down", "lora_up")
    named = {"musubi": (flat, "lora_unet_"), "diffusers": (f"transformer.{theirs}", "transformer.")}
    layer, prefix = named.get(style, (f"diffusion_model.{own}", "diffusion_model."))
    return (f"{layer}.{down}.weight", f"{layer}.{up}.weight", f"{layer}.alpha"), prefix


STYLES = {"comfy": None, "comfy with alpha": 1.5, "lightx2v": 6.0, "musubi": 1.0, "diffusers": None}


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_published_names_are_merged(style: str) -> None:
    video, alpha = model(), STYLES[style]
    before = weights.to_diffusers(video)
    layers = [layer for layer in THEIRS if before.get(f"{layer}.weight", np.zeros(0)).ndim > 1]
    named = {layer: names_in(style.split()[0], THEIRS[layer], layer) for layer in layers}
    names = {layer: x for layer, (x, _) in named.items()}
    given, want = drawn(before, names, 3, alpha)
    assert {weights.lora_prefix(video, given)} == {prefix for _, prefix in named.values()}
    assert sorted(weights.merge_lora(video, given, SCALE)) == sorted(layers)
    check(video, before, want)


def lightx2v(name: str) -> str:
    """Return LightX2V's name for the change of a Wan tensor."""
    for end, theirs in ((".weight", ".diff"), (".bias", ".diff_b"), (".modulation", ".diff_m")):
        if name.endswith(end):
            return name.removesuffix(end) + theirs
    return f"{name}.diff"


ENDS = (".weight", ".bias", "")


def test_differences_of_lightx2v_are_added() -> None:
    """LightX2V saves some changes as whole tensors, not as two matrices."""
    video, rng = model(), np.random.default_rng(1)
    before, given, want = weights.to_diffusers(video), {}, {}
    named = (
        (f"{x}{end}", f"diffusion_model.{lightx2v(THEIRS[x] + end)}")
        for x in THEIRS
        for end in ENDS
    )
    for theirs, own in (both for both in named if both[0] in before):
        given[own] = rng.normal(size=before[theirs].shape).astype(np.float32)
        want[theirs] = before[theirs].astype(np.float64) + 0.5 * given[own].astype(np.float64)
    assert want.keys() == before.keys()
    assert {"diffusion_model.blocks.0.diff_m", "diffusion_model.head.diff_m"} < given.keys()
    weights.merge_lora(video, given, 0.5)
    check(video, before, want)


@pytest.mark.parametrize("style", ["comfy", "musubi", "diffusers"])
def test_image_to_video_lora_without_image_keys(style: str) -> None:
    """After the remedy for missing image keys, the rest is merged and skipped layers are listed."""
    video = filled(nnx.eval_shape(lambda: WanTransformer3D(Sizes(**made.MODEL), rngs=nnx.Rngs(0))))
    before = weights.to_diffusers(video)
    names = ("attn1.to_q", "attn2.to_k", "attn2.add_k_proj", "attn2.add_v_proj")
    layers = [f"blocks.{i}.{x}" for i in range(2) for x in names]
    named = {layer: names_in(style, THEIRS[layer], layer)[0] for layer in layers}
    shapes = {
        layer: before[f"{layer.replace('add_', 'to_').removesuffix('_proj')}.weight"]
        for layer in layers
    }
    given, want = drawn({f"{layer}.weight": x for layer, x in shapes.items()}, named, 2, None)
    with pytest.raises(WeightsError, match="strict=False") as error:
        weights.merge_lora(video, given, SCALE)
    assert "did you mean" not in str(error.value)
    found = weights.merge_lora(video, given, SCALE, strict=False)
    assert set(found) == {layer for layer in layers if "add" not in layer}
    assert len(found.left_out) == 4 and all("img" in x or "add" in x for x in found.left_out)
    check(video, before, {x: y for x, y in want.items() if "add" not in x})


def test_every_name_is_of_one_layer() -> None:
    assert check_names(model(), layer_names.wan) == {"patch_embedding"}
