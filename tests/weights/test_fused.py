"""Tensors of several layers, and LoRA for them: split on loading, joined on saving."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import maxattn as ma
from maxattn import weights
from maxattn.errors import WeightsError
from maxattn.sharding import place
from tests.weights.models import check_added, equal, product, refused

C, N, H = 12, 2, 4


def joint(seed: int = 0) -> ma.JointAttention:
    how: dict[str, Any] = {"heads": N, "dim_head": H, "kv_heads": 1, "bias": True}
    return ma.JointAttention(C, 8, **how, rngs=nnx.Rngs(seed))


class Parallel(nnx.Module):
    """A layer whose file has attention's projections and another layer in one tensor."""

    diffusers_fused: ClassVar[dict[str, tuple[str, ...]]] = {
        "to_all": ("attn.to_q", "attn.to_k", "attn.to_v", "mlp")
    }

    def __init__(self, rngs: nnx.Rngs) -> None:
        how: dict[str, Any] = {"heads": N, "dim_head": H, "bias": True, "out_proj": False}
        self.attn = ma.FlaxAttention(C, **how, rngs=rngs)
        self.mlp = nnx.Linear(C, 5, rngs=rngs, bias_init=nnx.initializers.normal())


class Model(nnx.Module):
    """Separate layers, and stacked ones."""

    diffusers_stacked: ClassVar[tuple[str, ...]] = ("stacked",)

    def __init__(self, seed: int) -> None:
        self.one = Parallel(nnx.Rngs(seed))

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs: nnx.Rngs) -> Parallel:
            return Parallel(rngs)

        self.stacked = layers(nnx.Rngs(seed + 1))


def fused(held: dict[str, np.ndarray], whole: str, *parts: str) -> dict[str, np.ndarray]:
    """Join layers of a state dict, as diffusers' `fuse_projections` does."""
    ends = [end for end in ("weight", "bias") if f"{parts[0]}.{end}" in held]
    return {f"{whole}.{e}": np.concatenate([held[f"{part}.{e}"] for part in parts]) for e in ends}


def joined(module: nnx.Module) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a state dict by layers, and a function that joins them."""
    held = weights.to_diffusers(module)
    own = fused(held, "to_qkv", "to_q", "to_k", "to_v")
    return held, own | fused(held, "to_added_qkv", "add_q_proj", "add_k_proj", "add_v_proj")


def test_a_tensor_of_several_layers_is_read_and_written(tmp_path: Path) -> None:
    one, other = Model(0), Model(5)
    whole = weights.to_diffusers(one)
    assert {n: v.shape for n, v in whole.items() if n.startswith("stacked.2")} == {
        "stacked.2.to_all.weight": (3 * N * H + 5, C),
        "stacked.2.to_all.bias": (3 * N * H + 5,),
    }
    kernels = (one.one.attn.to_q, one.one.attn.to_k, one.one.attn.to_v, one.one.mlp)
    rows = np.concatenate([np.asarray(k.kernel[...]).T for k in kernels])
    np.testing.assert_array_equal(whole["one.to_all.weight"], rows)
    weights.save_diffusers(one, tmp_path)
    assert weights.load_diffusers(other, tmp_path) == weights.Loaded()
    equal(one, other)
    assert weights.load_diffusers(nnx.eval_shape(lambda: Model(0)), whole) == weights.Loaded()


def test_layers_that_diffusers_fused_are_read_and_written_apart() -> None:
    one, other = joint(), joint(3)
    held, whole = joined(one)
    apart = {n: v for n, v in held.items() if "proj" not in n and not n.startswith("to_")}
    apart |= {n: v for n, v in held.items() if "out" in n}
    assert weights.load_diffusers(other, apart | whole) == weights.Loaded()
    equal(one, other)
    assert weights.to_diffusers(other).keys() == held.keys()


def test_onto_a_mesh() -> None:
    one, other = joint(), joint(3)
    held, whole = joined(one)
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    place(other, mesh)
    apart = {n: v for n, v in held.items() if n.split(".")[0] not in ("to_q", "to_k", "to_v")}
    weights.load_diffusers(other, apart | {n: v for n, v in whole.items() if "added" not in n})
    equal(one, other)
    assert len(other.to_q.kernel[...].sharding.device_set) == 8


def test_layers_that_are_there_twice_are_the_same() -> None:
    one, other = joint(), joint(3)
    held, whole = joined(one)
    assert weights.load_diffusers(other, held | whole) == weights.Loaded()
    equal(one, other)
    whole["to_qkv.weight"] = whole["to_qkv.weight"] + np.float32(1)
    with pytest.raises(WeightsError, match=r"to_q\.weight\n.*to_qkv\.weight, which has other"):
        weights.load_diffusers(joint(), held | whole)


@pytest.mark.parametrize("rows", [3, 4 * N * H])
def test_other_rows_are_refused(rows: int) -> None:
    module = Parallel(nnx.Rngs(0))
    held = weights.to_diffusers(module) | {"to_all.weight": np.ones((rows, C), np.float32)}
    said = str(refused(module, lambda: weights.load_diffusers(module, held)))
    assert re.search(r"misshapen: mlp\.weight is \(\d+, 12\)", said)


def test_names_are_those_of_layers_and_a_dtype_is_kept() -> None:
    module = Parallel(nnx.Rngs(0))
    held = weights.to_diffusers(module)
    del held["to_all.bias"]
    with pytest.raises(WeightsError, match=r"missing: attn\.to_k\.bias"):
        weights.load_diffusers(Parallel(nnx.Rngs(0)), held)
    nnx.update(module, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(module)))
    assert weights.to_diffusers(module)["to_all.weight"].dtype == jnp.bfloat16


# ---- LoRA ----------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("name", ["to_qkv", "transformer.to_qkv", "lora_unet_to_qkv"])
def test_a_layer_of_several_is_split(name: str) -> None:
    held = pair(name, 3 * INNER, alpha=6.0, diff_b=np.arange(3 * INNER))
    module = attention()
    assert weights.check_lora(module, held) == ("to_q", "to_k", "to_v")
    whole = 0.5 * 6.0 / RANK * product(held, name)
    want = {f"{part}.weight": whole[start:stop] for part, (start, stop) in ROWS.items()}
    want |= {f"{part}.bias": 0.5 * np.arange(*rows) for part, rows in ROWS.items()}
    check_added(module, held, want, 0.5)


def test_a_layer_of_several_in_a_stack_and_beside_others() -> None:
    """Each stacked layer has its own LoRA, and the part that is not attention gets its rows too."""
    held = pair("stacked.1.to_all", 3 * INNER + MLP) | pair("one.to_all", 3 * INNER + MLP)
    want = {f"{n}.weight": product(held, n) for n in ("stacked.1.to_all", "one.to_all")}
    check_added(Model(0), held, want)


def test_metadata_name_the_layer_as_the_file_does(tmp_path: Any) -> None:
    """An alpha pattern matches the name of the joint layer."""
    said = {"r": RANK, "lora_alpha": 3, "alpha_pattern": {"to_qkv": 12}}
    held, path = pair("to_qkv", 3 * INNER), tmp_path / "lora.safetensors"
    save_file(held, path, {"lora_adapter_metadata": json.dumps(said)})
    whole = 4.0 * product(held, "to_qkv")
    want = {f"{part}.weight": whole[start:stop] for part, (start, stop) in ROWS.items()}
    check_added(attention(), path, want)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (pair("to_qkv", 2 * INNER), f"it must have {3 * INNER} rows, as many as to_q"),
        (pair("to_qkv", 3 * INNER) | pair("to_k", INNER), "to_qkv.lora_A.weight is for to_k too"),
        (pair("to_kv", 2 * INNER) | pair("to_qkv", 3 * INNER), "is for to_k too"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(held: Any, said: str) -> None:
    module = attention()
    assert said in str(refused(module, lambda: weights.merge_lora(module, held)))
