"""LoRA of layers that stand in one tensor of diffusers' files are split as they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import weights
from maxattn.errors import WeightsError

from .test_fused import C, H, Model, N

INNER, MLP, RANK = N * H, 5, 3
ROWS = {"to_q": (0, INNER), "to_k": (INNER, 2 * INNER), "to_v": (2 * INNER, 3 * INNER)}


def attention() -> ma.FlaxAttention:
    how: dict[str, Any] = {"heads": N, "dim_head": H, "bias": True, "rngs": nnx.Rngs(0)}
    return ma.FlaxAttention(C, **how)


def pair(name: str, rows: int, **more: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(name))
    a, b = rng.normal(size=(RANK, C)), rng.normal(size=(rows, RANK))
    made = {"lora_A.weight": a, "lora_B.weight": b, **more}
    return {f"{name}.{end}": np.asarray(x, np.float32) for end, x in made.items()}


def changes(module: nnx.Module, tensors: Any, **how: Any) -> dict[str, np.ndarray]:
    """Merge, and return what was added to each tensor of diffusers."""
    before = weights.to_diffusers(module)
    weights.merge_lora(module, tensors, **how)
    after = weights.to_diffusers(module)
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("name", ["to_qkv", "transformer.to_qkv", "lora_unet_to_qkv"])
def test_a_layer_of_several_is_split(name: str) -> None:
    held = pair(name, 3 * INNER, alpha=6.0, diff_b=np.arange(3 * INNER))
    module = attention()
    assert weights.check_lora(module, held) == ("to_q", "to_k", "to_v")
    added = changes(module, held, scale=0.5)
    whole = 0.5 * 6.0 / RANK * held[f"{name}.lora_B.weight"] @ held[f"{name}.lora_A.weight"]
    for part, (start, stop) in ROWS.items():
        np.testing.assert_allclose(added[f"{part}.weight"], whole[start:stop], atol=1e-5)
        np.testing.assert_allclose(added[f"{part}.bias"], 0.5 * np.arange(start, stop), atol=1e-5)
    assert not added["to_out.0.weight"].any()


def test_a_layer_of_several_in_a_stack_and_beside_others() -> None:
    """Each stacked layer has its own, and the part that is no attention gets its rows too."""
    held = pair("stacked.1.to_all", 3 * INNER + MLP) | pair("one.to_all", 3 * INNER + MLP)
    added = changes(Model(0), held)
    for name in ("stacked.1.to_all", "one.to_all"):
        whole = held[f"{name}.lora_B.weight"] @ held[f"{name}.lora_A.weight"]
        np.testing.assert_allclose(added[f"{name}.weight"], whole, atol=1e-5)
    assert not added["stacked.0.to_all.weight"].any()


def test_metadata_name_the_layer_as_the_file_does(tmp_path: Any) -> None:
    """An alpha by pattern is that of the layer of several."""
    import json

    from safetensors.numpy import save_file

    said = {"r": RANK, "lora_alpha": 3, "alpha_pattern": {"to_qkv": 12}}
    held, path = pair("to_qkv", 3 * INNER), tmp_path / "lora.safetensors"
    save_file(held, path, {"lora_adapter_metadata": json.dumps(said)})
    added = changes(attention(), path)
    whole = 4.0 * held["to_qkv.lora_B.weight"] @ held["to_qkv.lora_A.weight"]
    np.testing.assert_allclose(added["to_k.weight"], whole[INNER : 2 * INNER], atol=1e-5)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (pair("to_qkv", 2 * INNER), f"it must have the {3 * INNER} rows of to_q, to_k, to_v"),
        (pair("to_qkv", 3 * INNER) | pair("to_k", INNER), "to_qkv.lora_A.weight is for to_k too"),
        (pair("to_kv", 2 * INNER) | pair("to_qkv", 3 * INNER), "is for to_k too"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(held: Any, said: str) -> None:
    module = attention()
    before = weights.to_diffusers(module)
    with pytest.raises(WeightsError, match=said):
        weights.merge_lora(module, held)
    after = weights.to_diffusers(module)
    assert all((after[name] == before[name]).all() for name in before)
