"""LoRA names in files: prefixes are found or given, other codes' names are translated.

Layers are left out only on request.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from maxattn import weights
from maxattn.errors import WeightsError
from maxattn.weights.layer_names import names_of
from tests.golden_text import check_golden
from tests.weights.models import equal, model_of, refused

LAYERS = ("blocks.0.attn1.to_q", "blocks.1.attn1.to_out.0", "stacked.2.attn1.to_v")
FLAT = {layer: layer.replace(".", "_") for layer in LAYERS}
WAN = {"blocks.0.attn1.to_q": "blocks.0.self_attn.q"}
WAN |= {"blocks.1.attn1.to_out.0": "blocks.1.self_attn.o"}


def pair(
    layer: str, down: str = "lora_A", up: str = "lora_B", a: Any = (2, 16), b: Any = (16, 2)
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(layer))
    matrices = {f"{layer}.{down}.weight": a, f"{layer}.{up}.weight": b}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in matrices.items()}


def file(begin: str = "", layers: Any = LAYERS, *spelling: str) -> dict[str, np.ndarray]:
    """Write the same matrices under other names."""
    names = layers if isinstance(layers, dict) else dict.fromkeys(layers)
    found = {}
    for layer, name in names.items():
        known = pair(layer, *spelling)
        found |= {begin + n.replace(layer, name or layer, 1): x for n, x in known.items()}
    return found


def plain() -> Any:
    model = model_of(0)
    weights.merge_lora(model, file(layers=LAYERS), prefix="")
    return model


# ---- prefixes ------------------------------------------------------------------------------------


OF_WAN = {layer: WAN.get(layer) for layer in LAYERS}
FLAT_WAN = {layer: WAN.get(layer, layer).replace(".", "_") for layer in LAYERS}
BEGINS = [
    *((begin, LAYERS) for begin in ("", "transformer.", "unet.", "base_model.model.")),
    *(("diffusion_model.", layers) for layers in (LAYERS, OF_WAN)),
    ("", OF_WAN), ("lora_unet_", FLAT), ("lora_transformer_", FLAT), ("lycoris_", FLAT_WAN),
]  # fmt: skip


@pytest.mark.parametrize(("begin", "layers"), BEGINS)
def test_the_prefix_is_found(begin: str, layers: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, given = model_of(0), file(begin, layers, "lora_down", "lora_up")
    assert weights.lora_prefix(model, given) == begin
    assert set(weights.merge_lora(model, given)) == set(LAYERS)
    equal(model, plain())
    assert all("no alpha" in record.getMessage() for record in caplog.records)


def test_which_part_was_taken_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, other = model_of(0), pair("text_encoder.layers.0.mlp.fc1")
    with caplog.at_level(logging.WARNING, "maxattn"):
        weights.merge_lora(model, other | file("unet."))
    equal(model, plain())
    check_golden("weights/lora_part_taken", caplog.records[0].getMessage())


def test_patterns_of_metadata_name_layers_as_the_file_does(tmp_path) -> None:
    """The file is like diffusion-pipe's for Wan: peft's settings, the original code's names."""
    folder, model, other = tmp_path / "lora", model_of(0), model_of(0)
    folder.mkdir()
    layers = {layer: WAN[layer] for layer in WAN}
    save_file(file("diffusion_model.", layers), folder / "adapter_model.safetensors")
    said = '{"peft_type": "LORA", "lora_alpha": 2, "r": 2, "alpha_pattern": {"self_attn.o": 6}}'
    (folder / "adapter_config.json").write_text(said)
    weights.merge_lora(model, folder)
    weights.merge_lora(other, file(layers=("blocks.0.attn1.to_q",)))
    weights.merge_lora(other, file(layers=("blocks.1.attn1.to_out.0",)), 3.0)
    equal(model, other)


# ---- what is refused -----------------------------------------------------------------------------

FLUX = pair("diffusion_model.double_blocks.0.img_attn.qkv")
# Of a model whose blocks have another name: each is close to a layer here.
OTHERS = pair("transformer.transformer_blocks.0.attn1.to_q") | pair(
    "transformer.transformer_blocks.0.attn1.to_k"
)
Q = "blocks.0.attn1.to_q"
WRONG: dict[str, tuple[Any, str | None]] = {
    "given_prefix": (file("transformer."), ""),
    "unknown_prefix": (file("my_model."), None),
    "unknown_prefix_beside_others": (file("my_model.") | pair("text.fc1"), None),
    "two_prefixes": (file("unet.") | file("lora_unet_", FLAT), None),
    "another_code": (FLUX, None),
    "another_code_flat": (pair("lora_unet_double_blocks_0_img_attn_qkv", "lora_down"), None),
    "another_size": (pair("diffusion_model.blocks.7.self_attn.q"), None),
    "another_model": (OTHERS, None),
    "text_encoder_alone": (pair("lora_te1_text_model_encoder_layers_0_mlp_fc1"), None),
    "one_layer_twice": (file("", LAYERS) | file("", WAN), None),
    "loha": ({f"lora_unet_{FLAT[Q]}.hada_w1_a": np.ones((16, 2))}, None),
    "lokr": ({f"lycoris_{FLAT[Q]}.lokr_w1": np.ones((4, 4))}, None),
    "dora_of_kohya": (
        file("lora_unet_", FLAT) | {f"lora_unet_{FLAT[Q]}.dora_scale": np.ones(16)},
        None,
    ),
    "three_matrices": ({f"lora_unet_{FLAT[Q]}.lora_mid.weight": np.ones((2, 2, 3, 3))}, None),
    "difference_shape": ({f"{Q}.diff": np.ones((16, 15), np.float32)}, None),
    "difference_and_pair": (pair(Q) | {f"{Q}.diff": np.ones((16, 16), np.float32)}, None),
    "difference_of_nothing": ({"blocks.0.norm3.diff": np.ones(16, np.float32)}, None),
    "difference_integers": ({f"{Q}.diff": np.ones((16, 16), np.int8)}, None),
    "difference_infinite": ({f"{Q}.diff_b": np.full(16, np.inf, np.float32)}, None),
    "window_of_another_size": (pair("patch", a=(2, 3, 1, 2, 2), b=(16, 2, 1, 1, 1)), None),
}


@pytest.mark.parametrize("kind", WRONG)
def test_names_that_do_not_fit(kind: str) -> None:
    model, (given, prefix) = model_of(0), WRONG[kind]
    load = lambda: weights.merge_lora(model, given, prefix=prefix)  # noqa: E731
    refused(model, load, f"lora_names_{kind}")


FOLLOWED = ("given_prefix", "unknown_prefix", "unknown_prefix_beside_others", "two_prefixes")


@pytest.mark.parametrize("kind", FOLLOWED)
def test_a_remedy_with_a_prefix_is_followed(kind: str) -> None:
    given, prefix = WRONG[kind]
    error = refused(model_of(0), lambda: weights.merge_lora(model_of(0), given, prefix=prefix))
    for named in re.findall(r'prefix="([^"]+)"', error.remedy):
        model = model_of(0)
        assert set(weights.merge_lora(model, given, prefix=named)) == set(LAYERS)
        equal(model, plain())


def test_layers_are_left_out_where_that_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    model, given = model_of(0), file("unet.") | pair("unet.blocks.9.attn1.to_q")
    given |= {"unet.blocks.9.attn1.to_q.alpha": np.float32(1)}
    with pytest.raises(WeightsError):
        weights.merge_lora(model, given)
    with caplog.at_level(logging.WARNING, "maxattn"):
        assert set(weights.check_lora(model, given, strict=False)) == set(LAYERS)
        assert set(weights.merge_lora(model, given, strict=False)) == set(LAYERS)
    equal(model, plain())
    told = next(m for m in (r.getMessage() for r in caplog.records) if "left out" in m)
    check_golden("weights/lora_left_out", told)
    for wrong in (FLUX, pair(Q, a=(2, 8)), {f"{Q}.hada_w1_a": np.ones((16, 2))}):
        with pytest.raises(WeightsError):
            weights.merge_lora(model, wrong, strict=False)


ODD = {
    "full weight": {"blocks.1.attn1.to_k.weight": np.ones((16, 16), np.float32)},
    "LoHa": {f"lora_unet_blocks_1_attn1_to_k.hada_w1_{x}": np.ones((16, 2)) for x in "ab"}
    | {"lora_unet_blocks_1_attn1_to_k.alpha": np.float32(1)},
    "DoRA": pair("blocks.1.attn1.to_k") | {"blocks.1.attn1.to_k.dora_scale": np.ones(16)},
    "three matrices": pair("blocks.1.attn1.to_k")
    | {"blocks.1.attn1.to_k.lora_mid.weight": np.ones((2, 2, 3, 3))},
    "another width": pair("blocks.1.attn1.to_k", a=(2, 8)),
    "rank zero": pair("blocks.1.attn1.to_k", a=(0, 16), b=(16, 0)),
    "difference": {"blocks.1.attn1.to_k.diff_b": np.ones(7, np.float32)},
    "rows": pair("blocks.1.attn1.to_qkv", b=(40, 2)),
    "absent bias": pair("stacked.0.attn9.to_k") | {"stacked.0.attn9.to_k.lora_B.bias": np.ones(16)},
    "absent modulation": {"head.diff_m": np.ones((1, 2, 16), np.float32)},
}


@pytest.mark.parametrize("kind", ODD)
def test_what_does_not_fit_is_left_out_whole(kind: str) -> None:
    begin = "lora_unet_" if kind == "LoHa" else ""
    model, given = model_of(0), file(begin, FLAT if begin else LAYERS) | ODD[kind]
    refused(model, lambda: weights.merge_lora(model, given))
    found = weights.merge_lora(model, given, strict=False)
    assert set(found) == set(LAYERS) and found.left_out
    assert set(weights.check_lora(model, given, strict=False).left_out) == set(found.left_out)
    equal(model, plain())
    with pytest.raises(WeightsError):  # nothing is left
        weights.merge_lora(model, ODD[kind], strict=False, prefix=begin)


def test_every_name_that_is_left_out_is_returned() -> None:
    given = file() | {k: x for i in range(40) for k, x in pair(f"other.{i}.to_q").items()}
    found = weights.merge_lora(model_of(0), given, strict=False)
    assert found.left_out == tuple(f"other.{i}.to_q" for i in range(40))


def test_a_deeper_model_is_told_by_its_blocks() -> None:
    for begin, end in (
        ("transformer.blocks.", ".attn1.to_q"),
        ("lora_unet_blocks_", "_attn1_to_q"),
    ):
        given = {k: x for i in range(40) for k, x in pair(f"{begin}{i}{end}").items()}
        error = refused(model_of(0), lambda: weights.merge_lora(model_of(0), given))  # noqa: B023
        assert "the file has blocks 0 to 39, and the module blocks 0 to 1" in error.remedy


class Two(nnx.Module):
    """Two layers whose names are equal if dots become underscores."""

    def __init__(self) -> None:
        linear = lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0))  # noqa: E731
        self.a, self.a_b = nnx.Dict(b_c=linear()), nnx.Dict(c=linear())


def test_a_name_of_two_layers_is_not_guessed() -> None:
    model = Two()
    assert "a_b_c" not in names_of(model).layers
    with pytest.raises(WeightsError, match="a_b_c"):
        weights.merge_lora(model, pair("lora_unet_a_b_c"))
    assert weights.merge_lora(model, pair("a_b.c")) == ("a_b.c",)
