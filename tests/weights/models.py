"""A small model for tests, and comparisons of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import weights
from maxattn.errors import WeightsError
from tests.golden_text import check_golden

SIZES: dict[str, Any] = {"query_dim": 16, "heads": 2, "dim_head": 8, "bias": True}
SIZES["qk_norm"] = "rms_norm_across_heads"


class Block(nnx.Module):
    diffusers_names: ClassVar[dict[str, str]] = {"ffn.up": "ffn.net.0.proj",
                                                 "table": "scale_shift_table"}  # fmt: skip

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attn1 = ma.FlaxAttention(**SIZES, rngs=rngs)
        self.ffn = nnx.Dict(up=nnx.Linear(16, 32, rngs=rngs))
        self.table = nnx.Param(jax.random.normal(rngs.params(), (1, 6, 16)))


class Model(nnx.Module):
    """One layer of each kind, blocks in a list, and stacked blocks."""

    diffusers_stacked: ClassVar[tuple[str, ...]] = ("stacked",)

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patch = nnx.Conv(3, 16, (1, 2, 4), rngs=rngs)
        self.words = nnx.Embed(5, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.stacked = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(
            jax.random.split(jax.random.key(7), 3)
        )
        self.norm = nnx.LayerNorm(16, rngs=rngs)


def values(module: nnx.Module | None) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in flat}


def equal(a: nnx.Module, b: nnx.Module) -> None:
    ours, theirs = values(a), values(b)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def refused(module: nnx.Module | None, load: Callable[[], Any], golden: str = "") -> WeightsError:
    """Fail unless a load raises and changes nothing; its error may be a golden one."""
    before = values(module) if module else {}
    with pytest.raises(WeightsError) as error:
        load()
    after = values(module) if module else {}
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    assert error.value.rule and error.value.remedy
    if golden:
        check_golden(f"weights/{golden}", str(error.value))
    return error.value


def check_added(
    model: nnx.Module, given: Any, want: dict[str, Any], scale: float = 1.0, **how: Any
) -> Any:
    """Merge LoRA; fail unless `want` is added to tensors of its names, and nothing to others."""
    before = weights.to_diffusers(model)
    merged = weights.merge_lora(model, given, scale, **how)
    after = weights.to_diffusers(model)
    assert want.keys() <= after.keys()
    for name, array in after.items():
        whole = before[name].astype(np.float64) + want.get(name, 0.0)
        np.testing.assert_allclose(array, whole, rtol=1e-6, atol=2e-6, err_msg=name)
    return merged


def product(tensors: dict[str, Any], layer: str, names: Any = ("lora_A", "lora_B")) -> np.ndarray:
    """Return B A of a layer in float64."""
    a, b = (np.asarray(tensors[f"{layer}.{name}.weight"], np.float64) for name in names)
    return b @ a


def mesh() -> jax.sharding.Mesh:
    return ma.AttentionConfig(
        ici_data_parallelism=1, ici_fsdp_parallelism=4, ici_tensor_parallelism=2
    ).make_mesh()


@cache
def _made(make: Callable[..., Any], *given: Any) -> Any:
    return make(*given)


def fresh(make: Callable[..., Any], *given: Any) -> Any:
    """Return a copy of the model that `make` makes, which is made only once."""
    return nnx.clone(_made(make, *given))


def _model(seed: int) -> Model:
    return Model(nnx.Rngs(seed))


def model_of(seed: int) -> Model:
    """Return a separate model, initialized from a seed."""
    return fresh(_model, seed)
