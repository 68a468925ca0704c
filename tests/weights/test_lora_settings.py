"""LoRA's metadata, in diffusers' header or peft's folder: a factor for each layer, or an error."""

from __future__ import annotations

import json
import re
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from maxattn import weights
from maxattn.errors import WeightsError
from maxattn.weights.lora_settings import names_layer
from tests.golden_text import check_golden
from tests.weights.models import refused

LAYERS = ("blocks.0.to_q", "blocks.0.to_k", "blocks.1.to_q", "blocks.10.to_q")
RANKS = (4, 2, 4, 1)
FILE, PEFT = "lora.safetensors", "base_model.model."
SAID: dict[str, Any] = {
    "r": 4, "lora_alpha": 16, "alpha_pattern": {}, "rank_pattern": {}, "use_rslora": False,
    "use_dora": False, "lora_bias": False, "peft_type": "LORA", "target_modules": ["to_q", "to_k"],
    "loftq_config": {}, "revision": None,
}  # fmt: skip


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
    model, plain, given = nnx.clone(_made()), weights.to_diffusers(_made()), tensors()
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
    model = nnx.clone(_made())
    error = refused(model, lambda: weights.merge_lora(model, source, prefix=prefix), golden)
    with pytest.raises(WeightsError) as checked:
        weights.check_lora(model, source, prefix=prefix)
    assert str(checked.value) == str(error)
    return error


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


@pytest.mark.parametrize("first", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_weights_that_begin_otherwise_and_add_alike_are_merged(first: Any):
    more = {"init_lora_weights": first, "use_qalora": False, "layer_replication": None}
    check_factors(header(SAID | more, ""), "", 4, 8, 4, 16)


REALS = [
    *((x, 1) for x in (np.int64(4), np.array([4], np.uint8), np.float16(4))),
    *((x, None) for x in (np.complex64(4 + 1j), np.bool_(True), np.float64(1e300))),
]


@pytest.mark.parametrize(("alpha", "factor"), REALS, ids=str)
def test_an_alpha_is_a_real_number(alpha: Any, factor: float | None):
    given = tensors() | {f"{LAYERS[0]}.alpha": alpha}
    if factor is None:
        assert "alpha" in str(check_refused(given, ""))
    else:
        check_factors(given, "", factor, 1, 1, 1)


# ---- names of layers in alpha_pattern ------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["", "to_(q", "([a-z_.]+)+X", "a{2}", "(?=a)b", r"blocks\.\d+", "to_[qk]", "a+", "a|b"]
)
def test_other_expressions_are_refused(key: str):
    error = check_refused(header(SAID | {"alpha_pattern": {key: 8}}, ""), "")
    assert "may be any text" in error.rule


def theirs(key: str, layer: str) -> bool:
    """Match as peft does, but for the dots."""
    key = re.sub(r"(?<!\\)\.(?!\*)", r"\.", key)
    return re.match(rf"(.*\.)?({key})$", layer) is not None


PARTS = st.sampled_from(["a", "b", ".", r"\.", ".*", ".*"])
KEYS = st.tuples(st.sampled_from(["", "^"]), st.lists(PARTS, min_size=1, max_size=6).map("".join),
                 st.sampled_from(["", "$"])).map("".join)  # fmt: skip


@given(KEYS, st.text("ab.", min_size=1, max_size=8))
def test_a_key_names_the_layers_that_it_names_for_peft(key: str, layer: str):
    assert names_layer(key, layer) == theirs(key, layer)


def test_no_pattern_takes_long():
    keys = [f"{i}{'.*a' * 60}.*X" for i in range(1_000)] + [
        f"blocks.{i}.to_q" for i in range(9_000)
    ]
    said = SAID | {"alpha_pattern": dict.fromkeys(keys, 8)}
    check_factors(header(said, ""), "", 2, 8, 2, 8)


# ---- what is refused -----------------------------------------------------------------------------


REFUSED: dict[str, Any] = {
    "kind_groups": {"alpha_pattern": {"(" * 5000: 8}},
    "kind_many": {"alpha_pattern": dict.fromkeys(map(str, range(20_000)), 8)},
    "kind_alpha_digits": {"lora_alpha": 10**400},
    "kind_pissa": {"init_lora_weights": "pissa_niter_16"},
    "kind_olora": {"init_lora_weights": "olora"},
    "kind_loftq": {"init_lora_weights": "loftq"},
    "kind_qalora": {"use_qalora": True},
    "kind_unknown_kind": {"use_something_new": True},
    "kind_layer_replication": {"layer_replication": [[0, 4], [2, 5]]},
    "kind_alora": {"alora_invocation_tokens": [1, 2]},
    "alpha_text": {"transformer.lora_alpha": "16"},
    "pattern_list": {"transformer.alpha_pattern": ["to_q"]},
    "pattern_text": {"transformer.alpha_pattern": {"to_q": "2"}},
    "pattern_expression": {"transformer.alpha_pattern": {"to_(q|k)": 2}},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_settings_that_are_wrong_or_of_another_method_are_refused(kind: str):
    changed = REFUSED[kind]
    if any(key.startswith("transformer.") for key in changed):
        check_refused(header(of_part("transformer") | changed), golden=f"lora_{kind}")
    else:
        check_refused(header(SAID | changed, ""), "", f"lora_{kind}")


@pytest.mark.parametrize("alpha", [None, True, float("nan"), float("inf"), [16], 10**400])
def test_an_alpha_that_is_no_number_is_refused(alpha: Any):
    check_refused(header(of_part("transformer", lora_alpha=alpha)))


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


def test_settings_without_alpha_are_refused():
    check_refused(header({"transformer.r": 4}), golden="lora_alpha_missing")


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
