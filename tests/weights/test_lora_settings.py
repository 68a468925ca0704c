"""Settings of published LoRA files that change how strong each layer is, or refuse the file."""

from __future__ import annotations

import json
import re
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


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.a_layer_with_a_name_of_many_letters = nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def merged(said: dict[str, Any], folder: Path) -> float:
    """Merge ones of rank 2 with settings; return the change of a number."""
    layer, one = "a_layer_with_a_name_of_many_letters", np.ones((4, 4), np.float32)
    tensors = {f"{layer}.lora_A.weight": one[:2], f"{layer}.lora_B.weight": one[:, :2].copy()}
    path = folder / "lora.safetensors"
    save_file(tensors, path, {"format": "pt", "lora_adapter_metadata": json.dumps(said)})
    model = Layer()
    before = float(model.a_layer_with_a_name_of_many_letters.kernel[0, 0])
    weights.merge_lora(model, path)
    return float(model.a_layer_with_a_name_of_many_letters.kernel[0, 0]) - before


PLAIN = {"peft_type": "LORA", "lora_alpha": 2, "r": 2}


@pytest.mark.parametrize(
    "key", ["", "to_(q", "([a-z_.]+)+X", "a{2}", "(?=a)b", r"blocks\.\d+", "to_[qk]", "a+", "a|b"]
)
def test_other_expressions_are_refused(key: str, tmp_path: Path):
    with pytest.raises(WeightsError, match="may be any text"):
        merged(PLAIN | {"alpha_pattern": {key: 8}}, tmp_path)


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


def test_no_pattern_takes_long(tmp_path: Path):
    keys = [f"{i}{'.*a' * 60}.*X" for i in range(1_000)] + [
        f"blocks.{i}.to_q" for i in range(9_000)
    ]
    assert merged(PLAIN | {"alpha_pattern": dict.fromkeys(keys, 8)}, tmp_path) == pytest.approx(2)


WRONG: dict[str, dict[str, Any]] = {
    "groups": {"alpha_pattern": {"(" * 5000: 8}},
    "many": {"alpha_pattern": dict.fromkeys(map(str, range(20_000)), 8)},
    "alpha_digits": {"lora_alpha": 10**400},
    "pissa": {"init_lora_weights": "pissa_niter_16"},
    "olora": {"init_lora_weights": "olora"},
    "loftq": {"init_lora_weights": "loftq"},
    "qalora": {"use_qalora": True},
    "unknown_kind": {"use_something_new": True},
    "layer_replication": {"layer_replication": [[0, 4], [2, 5]]},
    "alora": {"alora_invocation_tokens": [1, 2]},
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_plain_lora_is_refused_by_name(kind: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError) as error:
        merged(PLAIN | WRONG[kind], Path())
    check_golden(f"weights/lora_kind_{kind}", str(error.value))


@pytest.mark.parametrize("first", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_weights_that_begin_otherwise_and_add_alike_are_merged(first: Any, tmp_path: Path):
    said = {"init_lora_weights": first, "use_qalora": False, "layer_replication": None}
    assert merged(PLAIN | said, tmp_path) == pytest.approx(2)


@pytest.mark.parametrize(
    ("alpha", "change"),
    [(np.int64(4), 4), (np.array([4], np.uint8), 4), (np.float16(4), 4),
     (np.complex64(4 + 1j), None), (np.bool_(True), None), (np.float64(1e300), None)],
    ids=str,
)  # fmt: skip
def test_an_alpha_is_a_real_number(alpha: Any, change: float | None):
    layer, one = "a_layer_with_a_name_of_many_letters", np.ones((4, 4), np.float32)
    tensors = {f"{layer}.lora_A.weight": one[:2], f"{layer}.lora_B.weight": one[:, :2]}
    model = Layer()
    before = weights.to_diffusers(model)[f"{layer}.weight"]
    if change is None:
        with pytest.raises(WeightsError, match="alpha"):
            weights.merge_lora(model, tensors | {f"{layer}.alpha": alpha})
    else:
        weights.merge_lora(model, tensors | {f"{layer}.alpha": alpha})
    moved = weights.to_diffusers(model)[f"{layer}.weight"] - before
    np.testing.assert_allclose(moved, change or 0, atol=1e-5)
