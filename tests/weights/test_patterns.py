"""Expressions of names: what Python's `re` says, in time that is bounded."""

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
from maxattn.weights.patterns import MOST_STEPS, Budget, OutOfReach, Pattern
from tests.golden_text import check_golden
from tests.tries import tries
from tests.within import within


def theirs(expression: str, name: str) -> bool:
    """Match as peft does."""
    return re.match(rf"(.*\.)?({expression})$", name) is not None


CHARS = st.sampled_from("ab.1_")
ATOMS = st.sampled_from(
    ["a", "b", "1", "_", ".", r"\.", r"\d", r"\w", r"\W", r"\D", r"\S", "[ab]", "[^ab.]", "[a-z_]",
     "[.1-]", r"[\d.]", r"[^\w]", "[]a]", "to_q", "^", "$", "{", "}", "-"]
)  # fmt: skip
REPEATS = st.sampled_from(
    ["", "", "", "*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{,2}", "{2,}", "{,}"]
)


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parts = st.lists(inner, min_size=1, max_size=3)
    groups = st.tuples(st.sampled_from(["(", "(?:"]), parts.map("|".join), REPEATS)
    return parts.map("".join) | groups.map(lambda g: f"{g[0]}{g[1]}){g[2]}")


ONE = st.tuples(ATOMS, REPEATS).map(
    lambda part: part[0] + (part[1] if part[0] not in "^${" else "")
)
EXPRESSIONS = st.recursive(ONE, _grown, max_leaves=6)


@tries(600)
@given(EXPRESSIONS, st.lists(st.text(CHARS, max_size=8), max_size=6))
def test_it_says_what_re_says(expression: str, names: list[str]):
    try:
        re.compile(expression)
        pattern = Pattern(expression)
    except (re.error, OutOfReach):  # such as a repetition of a repetition
        return
    for name in ("", "a", "b.a", "to_q", "x.to_q", *names):
        assert pattern.matches(name, Budget()) == theirs(expression, name), (expression, name)


KINDS = [
    "to_q", "blocks.0.to_q", r"blocks\.\d+\.to_q", r"blocks\.(0|1[0-9])\.attn1\.to_(q|k|v)",
    ".*to_q", "^blocks.*", r"(?:down|up)_blocks\.[0-3]\..*\.to_out\.0", "a{2,3}", "x+?",
    "[^.]+.to_k",
]  # fmt: skip
NAMES = [
    "to_q", "blocks.0.to_q", "blocks.10.attn1.to_v", "up_blocks.3.x.to_out.0", "aaa", "b.xx",
    "z.to_k", "blocks.10.to_q", "down_blocks.4.to_out.0",
]  # fmt: skip


@pytest.mark.parametrize("expression", KINDS)
def test_what_people_write_is_taken(expression: str):
    for name in NAMES:
        assert Pattern(expression).matches(name, Budget()) == theirs(expression, name)
    assert any(theirs(expression, name) for name in NAMES)


REFUSED = {
    "open_groups": "(" * 5000,
    "deep_groups": "(" * 100 + "a" + ")" * 100,
    "repeats": "a{99999999999}",
    "digits": "a{" + "9" * 900 + "}",
    "look_around": "(?=a)b",
    "behind": "(?<!a)b",
    "back_reference": r"(a)\1",
    "flag": "(?i)TO_Q",
    "named": "(?P<x>a)",
    "atomic": "(?>a+)b",
    "possessive": "a*+b",
    "twice": "a**",
    "nothing": "*a",
    "range": "[z-a]",
    "open_class": "[a",
    "end": "a\\",
    "close": "a)",
    "order": "a{3,2}",
    "boundary": r"\bto_q",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_taken_is_refused(kind: str):
    with within(), pytest.raises(OutOfReach) as error:
        Pattern(REFUSED[kind])
    assert len(str(error.value)) < 200


SLOW = [
    "([a-z_.]+)+X", "(a*)*b", "(a|a)*b", "(a|aa)+$", "(.*)*X", "(.*.*.*.*.*.*.*.*)*X", "((a+)+)+b",
    "(a?){30}a{30}", "(((((a*)*)*)*)*)*b", "((a{0,1000}){0,1000}){0,1000}b",
    ".*.*.*.*.*.*.*.*.*.*=",
    "(" * 15 + "a" + "{1,999})" * 15, "(x+x+)+y",
]  # fmt: skip
LONG_NAMES = ["a" * 36, "a" * 400, "x." * 300, "blocks_" * 6]
MATCHED = {"(a|aa)+$": LONG_NAMES[:2], "(a?){30}a{30}": LONG_NAMES[:1], SLOW[-2]: LONG_NAMES[:2]}


@pytest.mark.parametrize("expression", SLOW)
@pytest.mark.parametrize("name", LONG_NAMES)
def test_no_expression_takes_long(expression: str, name: str):
    with within(20):
        try:
            found = Pattern(expression).matches(name, Budget())
        except OutOfReach as error:
            assert "too long" in str(error)
        else:
            assert found == (name in MATCHED.get(expression, ()))


def test_the_steps_of_a_file_are_counted_together():
    budget, pattern = Budget(), Pattern("(a|b)+")
    with within(30), pytest.raises(OutOfReach):
        for _ in range(MOST_STEPS):
            pattern.matches("ab" * 20, budget)


# ---- in a file -----------------------------------------------------------------------------------


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


def test_a_file_cannot_hang_a_merge(tmp_path: Path):
    with within(20):
        assert merged(PLAIN | {"alpha_pattern": {"([a-z_.]+)+X": 8}}, tmp_path) == pytest.approx(2)
        assert merged(PLAIN | {"alpha_pattern": {"([a-z_.]+)+s": 8}}, tmp_path) == pytest.approx(8)


MANY = {f"{i}.{'x' * (i % 50)}(a|b)+.*": 1 for i in range(9_000)}
WRONG: dict[str, dict[str, Any]] = {
    "groups": {"alpha_pattern": {"(" * 5000: 8}},
    "repeats": {"alpha_pattern": {"a{99999999999}": 8}},
    "look_around": {"alpha_pattern": {"(?=to_q)": 8}},
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
    with within(), pytest.raises(WeightsError) as error:
        merged(PLAIN | WRONG[kind], Path())
    check_golden(f"weights/lora_kind_{kind}", str(error.value))


@pytest.mark.parametrize("first", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_weights_that_begin_otherwise_and_add_alike_are_merged(first: Any, tmp_path: Path):
    said = {"init_lora_weights": first, "use_qalora": False, "layer_replication": None}
    assert merged(PLAIN | said, tmp_path) == pytest.approx(2)


def test_many_expressions_are_read_in_bounded_time(tmp_path: Path):
    with within(60):
        assert merged(PLAIN | {"alpha_pattern": MANY}, tmp_path) == pytest.approx(2)


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
