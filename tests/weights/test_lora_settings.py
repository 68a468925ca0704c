"""LoRA's metadata, in diffusers' header or peft's folder: a factor for each layer, or an error."""

from __future__ import annotations

import json
import re
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
from tests.weights.models import check_added, fresh, product, refused

LAYERS = ("blocks.0.to_q", "blocks.0.to_k", "blocks.1.to_q", "blocks.10.to_q")
RANKS = (4, 2, 4, 1)
FILE, PEFT, PART = "lora.safetensors", "base_model.model.", "transformer."
SAID: dict[str, Any] = {
    "r": 4, "lora_alpha": 16, "alpha_pattern": {}, "use_rslora": False,
    "rank_pattern": {"0.to_k": 2, "^blocks.10.to_q": 1},
    "use_dora": False, "lora_bias": False, "peft_type": "LORA", "target_modules": ["to_q", "to_k"],
    "loftq_config": {}, "revision": None,
}  # fmt: skip


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.to_q, self.to_k = nnx.Linear(8, 6, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)


class Model(nnx.Module):
    def __init__(self) -> None:
        self.blocks = nnx.List([Block(nnx.Rngs(i)) for i in range(11)])


def tensors(prefix: str = "") -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(0), {}
    for layer, rank in zip(LAYERS, RANKS, strict=True):
        found[f"{prefix}{layer}.lora_A.weight"] = rng.normal(size=(rank, 8)).astype(np.float32)
        found[f"{prefix}{layer}.lora_B.weight"] = rng.normal(size=(6, rank)).astype(np.float32)
    return found


def of_part(part: str = "transformer", **changed: Any) -> dict[str, Any]:
    """Flatten settings as diffusers does."""
    return {f"{part}.{key}": value for key, value in (SAID | changed).items()}


def header(said: Any, prefix: str = PART, more: dict[str, Any] | None = None) -> str:
    """Write a file as diffusers' save_lora_weights does; return its path."""
    text = said if isinstance(said, str) else json.dumps(said, indent=2, sort_keys=True)
    save_file(tensors(prefix) | (more or {}), FILE, {"format": "pt", "lora_adapter_metadata": text})
    return FILE


def peft(said: dict[str, Any] | str, name: str = "adapter_model.safetensors") -> str:
    """Write a folder as peft's save_pretrained does; return its path."""
    Path("peft").mkdir(exist_ok=True)
    save_file(tensors(PEFT), f"peft/{name}", {"format": "pt"})
    Path("peft/adapter_config.json").write_text(said if isinstance(said, str) else json.dumps(said))
    return "peft"


def check_factors(source: Any, prefix: str | None, *factors: float) -> None:
    """Fail unless each layer's kernel has changed by its factor times B A, and no other has."""
    given, of_layer = tensors(), zip(LAYERS, factors, strict=True)
    want = {f"{layer}.weight": 0.5 * by * product(given, layer) for layer, by in of_layer}
    assert set(check_added(fresh(Model), source, want, 0.5, prefix=prefix)) == set(LAYERS)


def check_refused(source: Any, prefix: str = PART, golden: str = "") -> WeightsError:
    """Fail unless both functions raise equal errors, and nothing has changed."""
    model = fresh(Model)
    error = refused(model, lambda: weights.merge_lora(model, source, prefix=prefix), golden)
    with pytest.raises(WeightsError) as checked:
        weights.check_lora(model, source, prefix=prefix)
    assert str(checked.value) == str(error)
    return error


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name files relative to the folder of the test, because errors have their paths."""
    monkeypatch.chdir(tmp_path)


# ---- what is read --------------------------------------------------------------------------------

THREE_PARTS = of_part("text_encoder", lora_alpha=1) | of_part() | of_part("t_2", lora_alpha=2)
TEXT_TOO = SAID | of_part("text_encoder", lora_alpha=1)
ROOTED = of_part(use_rslora=True, alpha_pattern={"to_k": 3})
ALPHA = {f"{PART}blocks.0.to_k.alpha": np.array(3, np.float32)}
READ: dict[str, tuple[Any, str | None, tuple[float, ...]]] = {
    "a_header": (lambda: header(of_part()), PART, (4, 8, 4, 16)),
    "a_prefix_that_is_found": (lambda: header(of_part()), None, (4, 8, 4, 16)),
    "a_folder_with_a_header": (lambda: header(of_part()) and Path.cwd(), PART, (4, 8, 4, 16)),
    "opened": (lambda: weights.SafeTensors(header(of_part())), PART, (4, 8, 4, 16)),
    "plain_names": (lambda: header(SAID, ""), "", (4, 8, 4, 16)),
    "plain_names_behind_a_prefix": (lambda: header(SAID), PART, (4, 8, 4, 16)),
    "one_part_needs_no_prefix": (lambda: header(of_part(), ""), "", (4, 8, 4, 16)),
    "the_prefix_picks_the_part": (lambda: header(THREE_PARTS), PART, (4, 8, 4, 16)),
    "plain_names_are_of_no_prefix": (lambda: header(TEXT_TOO, ""), "", (4, 8, 4, 16)),
    "peft": (lambda: peft(SAID), PEFT, (4, 8, 4, 16)),
    "peft_beside_another_name": (lambda: peft(SAID, "other.safetensors"), PEFT, (4, 8, 4, 16)),
    "peft_s_file": (lambda: f"{peft(SAID)}/adapter_model.safetensors", PEFT, (4, 8, 4, 16)),
    "another_file_beside_settings":
        (lambda: f"{peft(SAID, 'x.safetensors')}/x.safetensors", PEFT, (1, 1, 1, 1)),
    "rslora": (lambda: header(ROOTED), PART, (8, 3 / sqrt(2), 8, 16)),
    "an_alpha_of_a_tensor": (lambda: header(of_part(), more=ALPHA), PART, (4, 1.5, 4, 16)),
    # Divided by the rank whatever the metadata say: those who write it have rsLoRA's root in it.
    "an_alpha_and_rslora": (lambda: header(ROOTED, more=ALPHA), PART, (8, 1.5, 8, 16)),
    "an_empty_header": (lambda: header({}, ""), "", (1, 1, 1, 1)),
    "no_metadata": (lambda: save_file(tensors(), FILE) or FILE, "", (1, 1, 1, 1)),
    "a_state_dict": (tensors, "", (1, 1, 1, 1)),
    "lora_bias_without_biases": (lambda: header(of_part(lora_bias=True)), PART, (4, 8, 4, 16)),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_what_is_read(kind: str):
    make, prefix, factors = READ[kind]
    check_factors(make(), prefix, *factors)


def test_the_header_counts_before_a_file_beside_it():
    header(SAID | {"lora_alpha": 8}, "")
    Path("adapter_config.json").write_text(json.dumps(SAID))
    check_factors(Path.cwd(), "", 2, 4, 2, 8)


@pytest.mark.parametrize(
    ("patterns", "factors"),
    [
        ({"to_k": 2}, (4, 1, 4, 16)),
        ({"0.to_q": 2}, (0.5, 8, 4, 16)),  # not blocks.10: a name begins after a dot
        ({"o_q": 2, "blocks.0": 2, "^to_q": 2, "locks.1.*": 2}, (4, 8, 4, 16)),
        ({f"^{PEFT}blocks.0.to_q": 2}, (4, 8, 4, 16)),  # names are without the prefix
        ({r"^blocks\.1\.to_q$": 2}, (4, 8, 0.5, 16)),  # as diffusers writes a whole name
        ({"blocks.0.*": 2}, (0.5, 1, 4, 16)),
        ({".*to_q": 2.5}, (0.625, 8, 0.625, 2.5)),
        ({"^blocks.1.*_q": 2}, (4, 8, 0.5, 2)),
        ({"1.to_q": 2, "to_q": 1}, (0.25, 8, 0.5, 1)),  # the first that matches
        (None, (4, 8, 4, 16)),
    ],
)
def test_a_pattern_names_the_end_of_a_layer(patterns: Any, factors: tuple[float, ...]):
    check_factors(peft(SAID | {"alpha_pattern": patterns}), PEFT, *factors)


@pytest.mark.parametrize("first", [True, None, "gaussian", "eva", "orthogonal"])
def test_weights_that_begin_otherwise_and_add_alike_are_merged(first: Any):
    more = {"init_lora_weights": first, "use_qalora": False, "layer_replication": None}
    assert set(weights.check_lora(nnx.eval_shape(Model), header(SAID | more, ""))) == set(LAYERS)


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


def theirs(key: str, layer: str) -> bool:
    """Match as peft does."""
    return re.match(rf"(.*\.)?({key})$", layer) is not None


PARTS = st.sampled_from(["a", "b", ".", r"\.", ".*", ".*"])
KEYS = st.tuples(st.sampled_from(["", "^"]), st.lists(PARTS, min_size=1, max_size=6).map("".join),
                 st.sampled_from(["", "$"])).map("".join)  # fmt: skip


@given(KEYS, st.text("ab.", min_size=1, max_size=8))
def test_a_key_names_the_layers_that_it_names_for_peft(key: str, layer: str):
    assert names_layer(key, layer) == theirs(key, layer)


def test_no_pattern_takes_long():
    keys = [f"{i}{'.*a' * 60}.*X" for i in range(1_000)]
    keys += [f"blocks.{i}.to_q" for i in range(9_000)]
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
    "metadata_rank_zero": {"transformer.r": 0},
    "metadata_rank": {"transformer.rank_pattern": {"to_k": 2, "1.to_q": 3, "10.to_q": 1}},
    "pattern_expression": {"transformer.alpha_pattern": {"to_(q|k)": 2}},
    "dora": {"transformer.use_dora": True},
    **{f"no_switch_{x}": {f"transformer.{x}": "false"} for x in ("use_rslora", "use_dora")},
    **{f"no_number_{i}": {"transformer.lora_alpha": x}
       for i, x in enumerate((None, True, float("nan"), float("inf"), [16]))},
    **{f"no_name_{i}": {"alpha_pattern": {x: 8}} for i, x in enumerate(
        ("", "to_(q", "([a-z_.]+)+X", "a{2}", "(?=a)b", r"blocks\.\d+", "to_[qk]", "a+", "a|b"))},
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_settings_that_are_wrong_or_of_another_method_are_refused(kind: str):
    changed = REFUSED[kind]
    golden = "" if kind.startswith("no_") else f"lora_{kind}"
    if any(key.startswith(PART) for key in changed):
        error = check_refused(header(of_part() | changed), golden=golden)
    else:
        error = check_refused(header(SAID | changed, ""), "", golden)
    assert not kind.startswith("no_name") or "may contain .* for any text" in error.rule


OTHERS: dict[str, tuple[Any, str]] = {
    "of_another_method": (lambda: peft(SAID | {"peft_type": "LOHA"}), PEFT),
    "wrong_prefix": (lambda: header(of_part("text_encoder") | of_part(), "unet."), "unet."),
    "header_not_json": (lambda: header(json.dumps(of_part())[:-9]), PART),
    "alpha_missing": (lambda: header({"transformer.r": 4}), PART),
    "config_list": (lambda: peft("[1]"), PEFT),
    "several_parts": (lambda: header(of_part("text_encoder") | of_part(), ""), ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_files_that_are_refused(kind: str):
    make, prefix = OTHERS[kind]
    check_refused(make(), prefix, f"lora_{kind}")


def test_broken_settings_of_peft_are_refused():
    for text in ("16", "null", "[" * 100_000, "", "{'r': 4}"):
        assert check_refused(peft(text), PEFT).value == str(Path("peft", "adapter_config.json"))


def test_files_that_disagree_are_refused():
    half = len(tensors()) // 2
    names, index = list(tensors()), {}
    for i, some in enumerate((names[:half], names[half:])):
        said = {"lora_adapter_metadata": json.dumps(SAID | {"lora_alpha": 2**i})}
        save_file({name: tensors()[name] for name in some}, f"{i}.safetensors", said)
        index |= dict.fromkeys(some, f"{i}.safetensors")
    Path("lora.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    check_refused("lora.safetensors.index.json", "", "lora_files_disagree")
