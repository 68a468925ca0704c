"""LoRA merged into a model: its projections alone, and one error for all that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from maxattn import weights
from tests.weights.models import equal, model_of, refused


def lora(
    rank: int = 2, alpha: float | None = None, names: tuple[str, str] = ("lora_A", "lora_B")
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for layer in ("blocks.1.attn1.to_q", "blocks.1.attn1.to_out.0", "stacked.2.attn1.to_v"):
        found[f"{layer}.{names[0]}.weight"] = rng.normal(size=(rank, 16)).astype(np.float32)
        found[f"{layer}.{names[1]}.weight"] = rng.normal(size=(16, rank)).astype(np.float32)
        if alpha is not None:
            found[f"{layer}.alpha"] = np.float32(alpha)
    return found


@pytest.mark.parametrize(("alpha", "share"), [(None, 1.0), (1.0, 0.5)])
def test_lora_is_added_to_its_projections_alone(alpha: float | None, share: float):
    model, plain = model_of(0), weights.to_diffusers(model_of(0))
    change = lora(alpha=alpha)
    given = {f"transformer.{k}": v for k, v in change.items()}
    merged = weights.merge_lora(model, given, 0.7, prefix="transformer.")
    assert len(merged) == 3
    for name, array in weights.to_diffusers(model).items():
        layer, want = name.removesuffix(".weight"), plain[name]
        if layer in merged:
            product = change[f"{layer}.lora_B.weight"] @ change[f"{layer}.lora_A.weight"]
            want = want + 0.7 * share * product
        np.testing.assert_allclose(array, want, atol=1e-5, err_msg=name)


def test_lora_in_a_file_under_older_names(tmp_path: Path):
    one, other = model_of(0), model_of(0)
    save_file(lora(names=("lora.down", "lora.up")), tmp_path / "lora.safetensors")
    weights.merge_lora(one, tmp_path / "lora.safetensors")
    weights.merge_lora(other, lora())
    equal(one, other)
    assert load_file(tmp_path / "lora.safetensors")


def shapes(layer: str, down: tuple[int, int], up: tuple[int, int]) -> dict[str, np.ndarray]:
    return {f"{layer}.lora_A.weight": np.zeros(down), f"{layer}.lora_B.weight": np.zeros(up)}


WRONG = {
    "no layer": shapes("blocks.9.attn1.to_q", (2, 16), (16, 2)),
    "half": {"blocks.0.attn1.to_q.lora_A.weight": np.zeros((2, 16))},
    "shape": shapes("blocks.0.attn1.to_q", (2, 8), (16, 2)),
    "rank": shapes("blocks.0.attn1.to_q", (3, 16), (16, 2)),
    "name": {"blocks.0.attn1.to_q.weight": np.zeros((16, 16))},
    "alpha": {**lora(), "blocks.0.attn1.to_k.alpha": np.float32(1)},
    "nothing": {},
    "rank zero": shapes("blocks.0.attn1.to_q", (0, 16), (16, 0)),
    "four axes": shapes("blocks.0.attn1.to_q", (2, 16, 3, 3), (16, 2, 1, 1)),  # type: ignore[arg-type]
    "three alphas": {**lora(), "blocks.1.attn1.to_q.alpha": np.ones(3, np.float32)},
    "infinite alpha": {**lora(), "blocks.1.attn1.to_q.alpha": np.float32(np.inf)},
    "two spellings": {**lora(), **lora(names=("lora.down", "lora.up"))},
    "integers": {**lora(), "blocks.1.attn1.to_q.lora_A.weight": np.ones((2, 16), np.int8)},
    "lists": {**lora(), "blocks.1.attn1.to_q.lora_A.weight": [[1.0] * 16]},
    "no tensors": None,
}


@pytest.mark.parametrize("kind", WRONG)
def test_lora_that_does_not_fit(kind: str):
    model = model_of(0)
    golden = f"lora_{kind.replace(' ', '_')}"
    refused(model, lambda: weights.merge_lora(model, WRONG[kind]), golden)


SCALES = [float("nan"), float("inf"), "1", None, np.ones(2), 10**400, -(10**400), True, 1j]


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: str(scale)[:6])
def test_a_scale_of_lora_is_a_finite_number(scale: Any):
    model = model_of(0)
    golden = "lora_scale" if isinstance(scale, float) and scale != scale else ""
    error = refused(model, lambda: weights.merge_lora(model, lora(), scale), golden)
    assert error.setting == "scale"


@pytest.mark.parametrize(("dtype", "size"), [("float16", 300.0), ("float32", 1e20)])
def test_a_change_that_the_dtype_does_not_hold_changes_nothing(dtype, size):
    model = model_of(0)
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
    change = {name: x * 0 + size for name, x in lora().items()}
    *_, last = sorted(name for name in change if "lora_A" in name)
    change |= {name: x * 0 for name, x in change.items() if name != last and "lora_A" in name}
    refused(model, lambda: weights.merge_lora(model, change), f"lora_beyond_{dtype}")


def test_an_alpha_of_one_axis_is_taken():
    one, other = model_of(0), model_of(0)
    change = lora(alpha=4.0)
    weights.merge_lora(one, change)
    reshaped = {k: v.reshape(1) if k.endswith("alpha") else v for k, v in change.items()}
    weights.merge_lora(other, reshaped)
    equal(one, other)
