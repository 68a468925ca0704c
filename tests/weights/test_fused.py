"""Tensors of several layers: split as they are read, joined as they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import weights
from maxattn.errors import WeightsError
from maxattn.sharding import place

C, N, H = 12, 2, 4


def joint(seed: int = 0) -> ma.JointAttention:
    how: dict[str, Any] = {"heads": N, "dim_head": H, "kv_heads": 1, "bias": True}
    return ma.JointAttention(C, 8, **how, rngs=nnx.Rngs(seed))


class Parallel(nnx.Module):
    """A layer whose file has the projections of attention and of another layer in one."""

    diffusers_fused: ClassVar[dict[str, tuple[str, ...]]] = {
        "to_all": ("attn.to_q", "attn.to_k", "attn.to_v", "mlp")
    }

    def __init__(self, rngs: nnx.Rngs) -> None:
        how: dict[str, Any] = {"heads": N, "dim_head": H, "bias": True, "out_proj": False}
        self.attn = ma.FlaxAttention(C, **how, rngs=rngs)
        self.mlp = nnx.Linear(C, 5, rngs=rngs, bias_init=nnx.initializers.normal())


class Model(nnx.Module):
    """Layers of their own, and stacked ones."""

    diffusers_stacked: ClassVar[tuple[str, ...]] = ("stacked",)

    def __init__(self, seed: int) -> None:
        self.one = Parallel(nnx.Rngs(seed))

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs: nnx.Rngs) -> Parallel:
            return Parallel(rngs)

        self.stacked = layers(nnx.Rngs(seed + 1))


def state(module: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def same(one: nnx.Module, other: nnx.Module) -> None:
    jax.tree.map(np.testing.assert_array_equal, state(one), state(other))


def fused(held: dict[str, np.ndarray], whole: str, *parts: str) -> dict[str, np.ndarray]:
    """Join layers of a state dict, as diffusers' `fuse_projections` does."""
    ends = [end for end in ("weight", "bias") if f"{parts[0]}.{end}" in held]
    return {f"{whole}.{e}": np.concatenate([held[f"{part}.{e}"] for part in parts]) for e in ends}


def joined(module: nnx.Module) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a state dict by layers, and what joins them."""
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
    same(one, other)
    assert weights.load_diffusers(nnx.eval_shape(lambda: Model(0)), whole) == weights.Loaded()


def test_layers_that_diffusers_fused_are_read_and_written_apart() -> None:
    one, other = joint(), joint(3)
    held, whole = joined(one)
    apart = {n: v for n, v in held.items() if "proj" not in n and not n.startswith("to_")}
    apart |= {n: v for n, v in held.items() if "out" in n}
    assert weights.load_diffusers(other, apart | whole) == weights.Loaded()
    same(one, other)
    assert weights.to_diffusers(other).keys() == held.keys()


def test_onto_a_mesh() -> None:
    one, other = joint(), joint(3)
    held, whole = joined(one)
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    place(other, mesh)
    apart = {n: v for n, v in held.items() if n.split(".")[0] not in ("to_q", "to_k", "to_v")}
    weights.load_diffusers(other, apart | {n: v for n, v in whole.items() if "added" not in n})
    same(one, other)
    assert len(other.to_q.kernel[...].sharding.device_set) == 8


def test_layers_that_are_there_twice_are_the_same() -> None:
    one, other = joint(), joint(3)
    held, whole = joined(one)
    assert weights.load_diffusers(other, held | whole) == weights.Loaded()
    same(one, other)
    whole["to_qkv.weight"] = whole["to_qkv.weight"] + np.float32(1)
    with pytest.raises(WeightsError, match=r"to_q\.weight\n.*to_qkv\.weight, which has other"):
        weights.load_diffusers(joint(), held | whole)


@pytest.mark.parametrize("rows", [3, 4 * N * H])
def test_other_rows_are_refused(rows: int) -> None:
    module, before = Parallel(nnx.Rngs(0)), state(Parallel(nnx.Rngs(0)))
    held = weights.to_diffusers(module)
    held["to_all.weight"] = np.ones((rows, C), np.float32)
    with pytest.raises(WeightsError, match=r"misshapen: mlp\.weight is \(\d+, 12\)"):
        weights.load_diffusers(module, held)
    jax.tree.map(np.testing.assert_array_equal, state(module), before)


def test_what_is_missing_is_named_by_layers() -> None:
    held = weights.to_diffusers(Parallel(nnx.Rngs(0)))
    del held["to_all.bias"]
    with pytest.raises(WeightsError, match=r"missing: attn\.to_k\.bias"):
        weights.load_diffusers(Parallel(nnx.Rngs(0)), held)


def test_a_dtype_is_kept() -> None:
    module = Parallel(nnx.Rngs(0))
    nnx.update(module, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(module)))
    assert weights.to_diffusers(module)["to_all.weight"].dtype == jnp.bfloat16
