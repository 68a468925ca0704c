"""How strong LoRA is, as metadata say: diffusers' header and peft's folder, one factor for each
layer, or an error.
"""

from __future__ import annotations

import json
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from maxattn import weights
from maxattn.errors import WeightsError
from tests.golden_text import check_golden

LAYERS = ("blocks.0.to_q", "blocks.0.to_k", "blocks.1.to_q", "blocks.10.to_q")
RANKS = (4, 2, 4, 1)
FILE, PEFT = "lora.safetensors", "base_model.model."
SAID: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 16,
    "alpha_pattern": {},
    "rank_pattern": {},
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "peft_type": "LORA",
    "target_modules": ["to_q", "to_k"],
    "loftq_config": {},
    "revision": None,
}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.to_q, self.to_k = nnx.Linear(8, 6, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)


class Model(nnx.Module):
    def __init__(self) -> None:
        self.blocks = nnx.List([Block(nnx.Rngs(i)) for i in range(11)])


@cache
def _made() -> Model:
    return Model()


@cache
def _shapes() -> Model:
    return nnx.eval_shape(Model)


def model_and_weights() -> tuple[Model, dict[str, np.ndarray]]:
    """Return a model of its own, and its weights under diffusers' names; made once."""
    return nnx.clone(_made()), weights.to_diffusers(_made())


def tensors(prefix: str = "") -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(0), {}
    for layer, rank in zip(LAYERS, RANKS, strict=True):
        found[f"{prefix}{layer}.lora_A.weight"] = rng.normal(size=(rank, 8)).astype(np.float32)
        found[f"{prefix}{layer}.lora_B.weight"] = rng.normal(size=(6, rank)).astype(np.float32)
    return found


def of_part(part: str, **changed: Any) -> dict[str, Any]:
    """Return settings as diffusers flattens them."""
    return {f"{part}.{key}": value for key, value in (SAID | changed).items()}


def header(
    said: dict[str, Any] | str, prefix: str = "transformer.", more: dict[str, Any] | None = None
) -> str:
    """Write a file as diffusers' save_lora_weights does; return its path."""
    text = said if isinstance(said, str) else json.dumps(said, indent=2, sort_keys=True)
    save_file(tensors(prefix) | (more or {}), FILE, {"format": "pt", "lora_adapter_metadata": text})
    return FILE


def peft(said: dict[str, Any] | str, name: str = "adapter_model.safetensors") -> str:
    """Write a folder as peft's save_pretrained does; return its path."""
    Path("peft").mkdir()
    save_file(tensors(PEFT), f"peft/{name}", {"format": "pt"})
    Path("peft/adapter_config.json").write_text(said if isinstance(said, str) else json.dumps(said))
    return "peft"


def check_factors(source: Any, prefix: str, *factors: float) -> None:
    """Fail unless each layer's kernel has moved by its factor times B A, and all others not at
    all.
    """
    (model, plain), given = model_and_weights(), tensors()
    assert set(weights.check_lora(_shapes(), source, prefix=prefix)) == set(LAYERS)
    assert set(weights.merge_lora(model, source, 0.5, prefix=prefix)) == set(LAYERS)
    of_layer = dict(zip(LAYERS, factors, strict=True))
    for name, array in weights.to_diffusers(model).items():
        want, layer = plain[name], name.removesuffix(".weight")
        if layer in of_layer:
            change = given[f"{layer}.lora_B.weight"] @ given[f"{layer}.lora_A.weight"]
            want = want + 0.5 * of_layer[layer] * change
        np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-5, err_msg=name)


def check_refused(source: Any, prefix: str = "transformer.", golden: str = "") -> WeightsError:
    """Fail unless both functions refuse it alike, and nothing has changed."""
    model, before = model_and_weights()
    with pytest.raises(WeightsError) as error:
        weights.merge_lora(model, source, prefix=prefix)
    with pytest.raises(WeightsError) as checked:
        weights.check_lora(model, source, prefix=prefix)
    assert str(checked.value) == str(error.value)
    for name, array in weights.to_diffusers(model).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    if golden:
        check_golden(f"weights/{golden}", str(error.value))
    return error.value


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name files without the folder of the test: errors say their paths."""
    monkeypatch.chdir(tmp_path)


# ---- what is read --------------------------------------------------------------------------------


def test_alpha_is_in_the_header_that_diffusers_writes():
    check_factors(header(of_part("transformer")), "transformer.", 4, 8, 4, 16)
    check_factors(Path(FILE), "transformer.", 4, 8, 4, 16)
    check_factors(Path.cwd(), "transformer.", 4, 8, 4, 16)
    check_factors(weights.SafeTensors(FILE), "transformer.", 4, 8, 4, 16)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_a_header_of_one_model_has_plain_names(prefix: str):
    check_factors(header(SAID, prefix), prefix, 4, 8, 4, 16)


def test_one_part_needs_no_prefix():
    check_factors(header(of_part("transformer"), ""), "", 4, 8, 4, 16)


def test_the_prefix_picks_the_part():
    said = (
        of_part("text_encoder", lora_alpha=1)
        | of_part("transformer")
        | of_part("transformer_2", lora_alpha=2)
    )
    check_factors(header(said), "transformer.", 4, 8, 4, 16)


def test_plain_names_are_those_of_no_prefix():
    check_factors(header(SAID | of_part("text_encoder", lora_alpha=1), ""), "", 4, 8, 4, 16)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "other.safetensors"])
def test_alpha_is_in_the_folder_that_peft_writes(name: str):
    check_factors(peft(SAID, name), PEFT, 4, 8, 4, 16)


def test_peft_writes_its_settings_beside_its_file():
    check_factors(f"{peft(SAID)}/adapter_model.safetensors", PEFT, 4, 8, 4, 16)


def test_settings_beside_another_file_are_not_its_own():
    check_factors(f"{peft(SAID, 'other.safetensors')}/other.safetensors", PEFT, 1, 1, 1, 1)


def test_the_header_counts_before_a_file_beside_it():
    header(SAID | {"lora_alpha": 8}, "")
    Path("adapter_config.json").write_text(json.dumps(SAID))
    check_factors(Path.cwd(), "", 2, 4, 2, 8)


@pytest.mark.parametrize(
    ("patterns", "factors"),
    [
        ({"to_k": 2}, (4, 1, 4, 16)),
        ({"blocks.0.to_q": 2}, (0.5, 8, 4, 16)),
        ({"0.to_q": 2}, (0.5, 8, 4, 16)),  # not blocks.10: a name begins after a dot
        ({"o_q": 2}, (4, 8, 4, 16)),
        ({"blocks.0": 2}, (4, 8, 4, 16)),
        ({"^to_q": 2}, (4, 8, 4, 16)),
        ({f"^{PEFT}blocks.0.to_q": 2}, (4, 8, 4, 16)),  # names are without the prefix
        ({"^blocks.1.to_q": 2}, (4, 8, 0.5, 16)),  # as diffusers writes a whole name
        ({r"^blocks\.1\.to_q$": 2}, (4, 8, 0.5, 16)),
        ({"blocks.0.*": 2}, (0.5, 1, 4, 16)),
        ({".*to_q": 2.5}, (0.625, 8, 0.625, 2.5)),
        ({"^blocks.1.*_q": 2}, (4, 8, 0.5, 2)),
        ({"locks.1.*": 2}, (4, 8, 4, 16)),
        ({"1.to_q": 2, "to_q": 1}, (0.25, 8, 0.5, 1)),  # the first that matches
        (None, (4, 8, 4, 16)),
    ],
)
def test_a_pattern_names_the_end_of_a_layer(patterns: Any, factors: tuple[float, ...]):
    check_factors(peft(SAID | {"alpha_pattern": patterns}), PEFT, *factors)


def test_patterns_in_a_header():
    check_factors(
        header(of_part("unet", alpha_pattern={"blocks.0.to_q": 4}), "unet."), "unet.", 1, 8, 4, 16
    )


def test_rslora_divides_by_the_root_of_the_rank():
    said = of_part("transformer", use_rslora=True, alpha_pattern={"to_k": 3})
    check_factors(header(said), "transformer.", 8, 3 / sqrt(2), 8, 16)


@pytest.mark.parametrize("rslora", [False, True])
def test_alpha_as_a_tensor_wins(rslora: bool):
    """It is divided by the rank whatever the metadata say: those who write it have rsLoRA's root in
    it.
    """
    said = of_part("transformer", use_rslora=rslora, alpha_pattern={"to_k": 5})
    path = header(said, more={"transformer.blocks.0.to_k.alpha": np.array(3, np.float32)})
    root = 2 if rslora else 1
    check_factors(path, "transformer.", 4 * root, 1.5, 4 * root, 16)


@pytest.mark.parametrize("said", [None, {}])
def test_without_metadata_alpha_is_the_rank(said: Any):
    if said is None:
        save_file(tensors(), FILE)
    else:
        header(said, "")
    check_factors(FILE, "", 1, 1, 1, 1)
    check_factors(tensors(), "", 1, 1, 1, 1)


# ---- what is refused -----------------------------------------------------------------------------


def test_dora_is_refused():
    more = {"transformer.blocks.0.to_q.lora_magnitude_vector": np.ones(6, np.float32)}
    check_refused(header(of_part("transformer", use_dora=True), more=more), golden="lora_dora")


def test_another_method_is_refused():
    check_refused(peft(SAID | {"peft_type": "LOHA"}), PEFT, "lora_of_another_method")


def test_the_prefix_of_no_part_is_refused():
    path = header(of_part("text_encoder") | of_part("transformer"), "unet.")
    check_refused(path, "unet.", "lora_wrong_prefix")


def test_several_parts_and_no_prefix_are_refused():
    check_refused(header(of_part("text_encoder") | of_part("transformer"), ""), "")


def test_a_broken_header_is_refused():
    check_refused(header(json.dumps(of_part("transformer"))[:-9]), golden="lora_header_not_json")


@pytest.mark.parametrize("text", ["[1]", "16", "null", "[" * 100_000, "", "{'r': 4}"])
def test_broken_settings_of_peft_are_refused(text: str):
    error = check_refused(peft(text), PEFT)
    assert error.value == str(Path("peft", "adapter_config.json"))
    if text == "[1]":
        check_golden("weights/lora_config_list", str(error))


@pytest.mark.parametrize("alpha", [None, "16", True, float("nan"), float("inf"), [16], 10**400])
def test_an_alpha_that_is_no_number_is_refused(alpha: Any):
    error = check_refused(header(of_part("transformer", lora_alpha=alpha)))
    if alpha == "16":
        check_golden("weights/lora_alpha_text", str(error))


def test_settings_without_alpha_are_refused():
    check_refused(header({"transformer.r": 4}), golden="lora_alpha_missing")


@pytest.mark.parametrize(
    ("kind", "patterns"),
    [("list", ["to_q"]), ("text", {"to_q": "2"}), ("expression", {"to_(q|k)": 2})],
)
def test_patterns_that_say_nothing_are_refused(kind: str, patterns: Any):
    check_refused(
        header(of_part("transformer", alpha_pattern=patterns)), golden=f"lora_pattern_{kind}"
    )


@pytest.mark.parametrize("name", ["use_rslora", "use_dora"])
def test_a_switch_that_is_neither_is_refused(name: str):
    assert name in str(check_refused(header(of_part("transformer", **{name: "false"}))))


def test_biases_of_lora_are_refused():
    more = {"transformer.blocks.0.to_q.lora_B.bias": np.ones(6, np.float32)}
    check_refused(header(of_part("transformer", lora_bias=True), more=more), golden="lora_bias")


def test_lora_bias_without_biases_is_lora():
    check_factors(header(of_part("transformer", lora_bias=True)), "transformer.", 4, 8, 4, 16)


def test_files_that_disagree_are_refused():
    half = len(tensors()) // 2
    names, index = list(tensors()), {}
    for i, some in enumerate((names[:half], names[half:])):
        said = json.dumps(SAID | {"lora_alpha": 2**i})
        save_file(
            {name: tensors()[name] for name in some},
            f"{i}.safetensors",
            {"lora_adapter_metadata": said},
        )
        index |= dict.fromkeys(some, f"{i}.safetensors")
    Path("lora.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    check_refused("lora.safetensors.index.json", "", "lora_files_disagree")
