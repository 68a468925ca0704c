"""LoRA merged into a model: the sums, and one error for everything that does not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from maxattn import weights
from maxattn.errors import WeightsError
from tests.weights.models import check_added, equal, model_of, product, refused

Q = "blocks.0.attn1.to_q"
LAYERS = ("blocks.1.attn1.to_q", "blocks.1.attn1.to_out.0", "stacked.2.attn1.to_v")


def lora(
    rank: int = 2, alpha: float | None = None, names: tuple[str, str] = ("lora_A", "lora_B")
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for layer in LAYERS:
        found[f"{layer}.{names[0]}.weight"] = rng.normal(size=(rank, 16)).astype(np.float32)
        found[f"{layer}.{names[1]}.weight"] = rng.normal(size=(16, rank)).astype(np.float32)
        if alpha is not None:
            found[f"{layer}.alpha"] = np.float32(alpha)
    return found


def pair(layer: str, down: tuple[int, ...], up: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


# ---- what is added -------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "share"), [(None, 1.0), (1.0, 0.5)])
def test_lora_is_added_to_its_projections_alone(alpha: float | None, share: float):
    change = lora(alpha=alpha)
    want = {f"{layer}.weight": 0.7 * share * product(change, layer) for layer in LAYERS}
    given = {f"transformer.{k}": v for k, v in change.items()}
    merged = check_added(model_of(0), given, want, 0.7, prefix="transformer.")
    assert set(merged) == set(LAYERS)


def test_an_alpha_that_a_dict_has_lost_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    caplog.set_level("INFO")
    weights.merge_lora(model_of(0), lora(alpha=2.0))
    weights.merge_lora(model_of(0), {f"{Q}.diff": np.zeros((16, 16), np.float32)})
    assert not caplog.records
    weights.merge_lora(model_of(0), lora())
    save_file(lora(), tmp_path / "adapter_model.safetensors")
    weights.merge_lora(model_of(0), tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "no alpha found, so it is the rank" in caplog.text
    caplog.clear()
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 4}')
    weights.merge_lora(model_of(0), tmp_path)
    assert not caplog.records


def test_older_names_in_a_file_and_alphas_of_one_axis(tmp_path: Path):
    one, other = model_of(0), model_of(0)
    given = lora(alpha=4.0, names=("lora.down", "lora.up"))
    given = {k: v.reshape(1) if k.endswith("alpha") else v for k, v in given.items()}
    save_file(given, tmp_path / "lora.safetensors")
    weights.merge_lora(one, tmp_path / "lora.safetensors")
    weights.merge_lora(other, lora(alpha=4.0))
    equal(one, other)


def test_differences_are_added_as_they_are() -> None:
    rng = np.random.default_rng(3)
    given = {
        "blocks.0.self_attn.q.diff": (f"{Q}.weight", (16, 16)),
        "blocks.0.self_attn.q.diff_b": (f"{Q}.bias", (16,)),
        "blocks.1.self_attn.norm_q.diff": ("blocks.1.attn1.norm_q.weight", (16,)),
        "blocks.0.diff_m": ("blocks.0.scale_shift_table", (1, 6, 16)),  # as lightx2v saves it
        "blocks.1.modulation.diff": ("blocks.1.scale_shift_table", (1, 6, 16)),
        "stacked.1.scale_shift_table.diff": ("stacked.1.scale_shift_table", (1, 6, 16)),
        "patch.diff": ("patch.weight", (16, 3, 1, 2, 4)),
    }
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, (_, shape) in given.items()}
    want = {given[name][0]: 0.5 * x.astype(np.float64) for name, x in arrays.items()}
    arrays = {f"diffusion_model.{name}": x for name, x in arrays.items()}
    changed = check_added(model_of(0), arrays, want, 0.5)
    assert set(changed) == {re.sub(r"\.(weight|bias)$", "", name) for name in want}


def test_a_bias_of_lora_b_is_scaled_as_its_matrices() -> None:
    bias = np.arange(16, dtype=np.float32)
    given = pair(Q, (2, 16), (16, 2)) | {f"{Q}.lora_B.bias": bias, f"{Q}.alpha": np.float32(3)}
    want = {f"{Q}.weight": 0.7 * 3 / 2 * product(given, Q), f"{Q}.bias": 0.7 * 3 / 2 * bias}
    assert check_added(model_of(0), given, want, 0.7) == (Q,)


def test_a_window_is_merged() -> None:
    given = pair("patch", (2, 3, 1, 2, 4), (16, 2, 1, 1, 1))
    down, up = (x.astype(np.float64) for x in given.values())
    want = {"patch.weight": np.einsum("orabc,rithw->oithw", up, down) * 0.7 / 2}
    given |= {"patch.alpha": np.float32(1)}
    assert check_added(model_of(0), given, want, 0.7) == ("patch",)


def test_a_window_of_one_pixel_is_a_projection() -> None:
    one, other = model_of(0), model_of(0)
    weights.merge_lora(one, pair(Q, (2, 16, 1, 1), (16, 2, 1, 1)))
    weights.merge_lora(other, pair(Q, (2, 16), (16, 2)))
    equal(one, other)


# ---- what is refused -----------------------------------------------------------------------------

WRONG = {
    "no layer": pair("blocks.9.attn1.to_q", (2, 16), (16, 2)),
    "half": {f"{Q}.lora_A.weight": np.zeros((2, 16))},
    "shape": pair(Q, (2, 8), (16, 2)),
    "rank": pair(Q, (3, 16), (16, 2)),
    "name": {f"{Q}.weight": np.zeros((16, 16))},
    "alpha": {**lora(), "blocks.0.attn1.to_k.alpha": np.float32(1)},
    "nothing": {},
    "rank zero": pair(Q, (0, 16), (16, 0)),
    "four axes": pair(Q, (2, 16, 3, 3), (16, 2, 1, 1)),
    "three alphas": {**lora(), "blocks.1.attn1.to_q.alpha": np.ones(3, np.float32)},
    "infinite alpha": {**lora(), "blocks.1.attn1.to_q.alpha": np.float32(np.inf)},
    "two spellings": {**lora(), **lora(names=("lora.down", "lora.up"))},
    "integers": {**lora(), "blocks.1.attn1.to_q.lora_A.weight": np.ones((2, 16), np.int8)},
    "lists": {**lora(), "blocks.1.attn1.to_q.lora_A.weight": [[1.0] * 16]},
    "no tensors": None,
    "bias alone": {f"{Q}.lora_B.bias": np.ones(16, np.float32)},
    "bias shape": pair(Q, (2, 16), (16, 2)) | {f"{Q}.lora_B.bias": np.ones(15, np.float32)},
    "two biases": pair(Q, (2, 16), (16, 2))
    | {f"{Q}.{end}": np.ones(16, np.float32) for end in ("lora_B.bias", "diff_b")},
}


@pytest.mark.parametrize("kind", WRONG)
def test_lora_that_does_not_fit(kind: str):
    model = model_of(0)
    golden = f"lora_{kind.replace(' ', '_')}"
    refused(model, lambda: weights.merge_lora(model, WRONG[kind]), golden)


def test_a_scale_of_lora_is_a_finite_number():
    model = model_of(0)
    for scale in (float("inf"), "1", None, np.ones(2), 10**400, -(10**400), True, 1j):
        with pytest.raises(WeightsError) as error:
            weights.merge_lora(model, lora(), scale)  # type: ignore[arg-type]
        assert error.value.setting == "scale"
    refused(model, lambda: weights.merge_lora(model, lora(), float("nan")), "lora_scale")


@pytest.mark.parametrize(("dtype", "size"), [("float16", 300.0), ("float32", 1e20)])
def test_a_change_that_the_dtype_does_not_hold_changes_nothing(dtype, size):
    model = model_of(0)
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
    change = {name: x * 0 + size for name, x in lora().items()}
    *_, last = sorted(name for name in change if "lora_A" in name)
    change |= {name: x * 0 for name, x in change.items() if name != last and "lora_A" in name}
    refused(model, lambda: weights.merge_lora(model, change), f"lora_beyond_{dtype}")


class Grouped(nnx.Module):
    """A convolution with separate groups, whose kernel is not a product B A."""

    def __init__(self) -> None:
        self.conv = nnx.Conv(4, 8, (3, 3), feature_group_count=2, rngs=nnx.Rngs(0))


def test_groups_are_refused() -> None:
    with pytest.raises(WeightsError):
        weights.merge_lora(Grouped(), pair("conv", (2, 2, 3, 3), (8, 2, 1, 1)))
