"""Parameters that model files do not have: LoRA, other kernels, statistics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from safetensors.numpy import save_file

from maxattn import weights
from maxattn.errors import WeightsError
from tests.golden_text import check_golden, check_refused


class Model(nnx.Module):
    """Two layers, the first adapted in the way `adapt`."""

    def __init__(self, adapt: Callable[[nnx.Rngs], Any] | None = None) -> None:
        rngs = nnx.Rngs(0)
        self.to_q: Any = nnx.Linear(6, 4, rngs=rngs) if adapt is None else adapt(rngs)
        self.to_k = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.to_k(self.to_q(x))


def wrapped(rngs: nnx.Rngs) -> nnx.Module:
    base = nnx.Linear(6, 4, rngs=rngs)
    made = nnx.LoRA(6, 2, 4, base_module=base, rngs=rngs)
    made.lora_b[...] = jnp.ones((2, 4))
    return made


def in_one(rngs: nnx.Rngs) -> nnx.Module:
    made = nnx.LoRALinear(6, 4, lora_rank=2, rngs=rngs)
    made.lora.lora_b[...] = jnp.ones((2, 4))
    return made


ADAPTED = {"LoRA": wrapped, "LoRALinear": in_one}
PLAIN = {"to_q.weight", "to_q.bias", "to_k.weight", "to_k.bias"}
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6)), jnp.float32)


@pytest.mark.parametrize("kind", ADAPTED)
def test_a_lora_has_the_names_of_peft(kind: str) -> None:
    model = Model(ADAPTED[kind])
    tensors = weights.to_diffusers(model)
    assert set(tensors) == PLAIN | {"to_q.lora_A.weight", "to_q.lora_B.weight"}
    assert tensors["to_q.lora_A.weight"].shape == (2, 6)
    other = Model(ADAPTED[kind])
    nnx.update(other, nnx.map_state(lambda *x: x[-1] * 0, nnx.state(other)))
    weights.load_diffusers(other, tensors)
    np.testing.assert_array_equal(other(X), model(X))


@pytest.mark.parametrize("kind", ADAPTED)
def test_a_folder_refuses_it_and_the_remedy_loads(kind: str, tmp_path: Path) -> None:
    """The remedy is two files: the model without LoRA, and the LoRA, which is merged on loading."""
    model = Model(ADAPTED[kind])
    check_refused(
        f"weights/save_with_{kind}", WeightsError, lambda: weights.save_diffusers(model, tmp_path)
    )
    assert not list(tmp_path.iterdir())
    tensors = weights.to_diffusers(model)
    lora = {name: x for name, x in tensors.items() if ".lora_" in name}
    rest = {name: x for name, x in tensors.items() if name not in lora}
    save_file(rest, tmp_path / "model.safetensors")
    save_file(lora, tmp_path / "lora.safetensors")
    plain = Model()
    weights.load_diffusers(plain, tmp_path / "model.safetensors")
    assert not np.allclose(plain(X), model(X), atol=1e-3)
    weights.merge_lora(plain, tmp_path / "lora.safetensors")
    np.testing.assert_allclose(plain(X), model(X), atol=1e-5)


def test_the_file_of_a_model_is_loaded_under_its_lora() -> None:
    model, plain = Model(wrapped), Model()
    weights.load_diffusers(model, weights.to_diffusers(plain), strict=False)
    np.testing.assert_array_equal(model.to_q.base_module.kernel, plain.to_q.kernel)


class Quantised(nnx.Linear):
    """A layer with integer weights and a scale for each output."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.int8) -> None:
        super().__init__(6, 4, rngs=rngs)
        self.kernel = nnx.Param(jnp.ones((6, 4), dtype))
        self.scale = nnx.Param(jnp.ones(4))


class Renamed(Quantised):
    diffusers_names = {"scale": "weight_scale"}  # noqa: RUF012


@struct.dataclass
class Pair:
    """A quantised array in the style of other libraries."""

    numbers: Any
    scales: Any


class Buffer(nnx.Variable):
    """A variable that is not a parameter."""


class Own(nnx.Param):
    """A user-defined parameter class."""


def with_one(name: str, variable: nnx.Variable) -> Callable[[nnx.Rngs], nnx.Module]:
    def made(rngs: nnx.Rngs) -> nnx.Module:
        layer = nnx.Linear(6, 4, rngs=rngs)
        setattr(layer, name, variable)
        return layer

    return made


PAIR: Any = Pair(jnp.ones((6, 4), jnp.int8), jnp.ones(4))
REFUSED: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "two_of_one_name": Quantised,
    "whole_numbers": Renamed,
    "8_bits": lambda rngs: Renamed(rngs, jnp.float8_e4m3fn),
    "no_array": with_one("kernel", nnx.Param(PAIR)),
    "buffer": with_one("table", Buffer(jnp.ones(4))),
    "lora_of_its_own": with_one("down", nnx.LoRAParam(jnp.ones((6, 2)))),
    "kernel_of_linear_general": lambda rngs: nnx.LinearGeneral(6, (2, 2), rngs=rngs),
    "kernel_of_einsum": lambda rngs: nnx.Einsum("ab,bc->ac", (6, 4), rngs=rngs),
    "batch_norm": lambda rngs: nnx.BatchNorm(6, rngs=rngs),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_reader_knows_is_refused(kind: str, tmp_path: Path) -> None:
    model = Model(REFUSED[kind])
    with pytest.raises(WeightsError) as caught:
        weights.save_diffusers(model, tmp_path)
    check_golden(f"weights/save_{kind}", str(caught.value))
    assert not list(tmp_path.iterdir())
    if kind == "lora_of_its_own":  # a caller who takes the names may know them
        assert weights.to_diffusers(model).keys() == PLAIN | {"to_q.down"}
        return
    with pytest.raises(WeightsError) as again:
        weights.to_diffusers(model)
    assert str(again.value) == str(caught.value)


SAVED: dict[str, tuple[Callable[[nnx.Rngs], nnx.Module], set[str]]] = {
    "a Param of its own class": (with_one("kernel", Own(jnp.ones((6, 4)))), set()),
    "a Param under its own name": (with_one("gate", Own(jnp.ones(4))), {"to_q.gate"}),
    "whole numbers that are no kernel": (
        with_one("places", nnx.Param(jnp.arange(4))),
        {"to_q.places"},
    ),
    "a scale with a name in its class": (
        lambda rngs: Renamed(rngs, jnp.float32),
        {"to_q.weight_scale"},
    ),
    "nothing": (with_one("gate", nnx.Param(None)), set()),
    "a cache": (with_one("table", nnx.Cache(jnp.ones(4))), set()),
}


@pytest.mark.parametrize("kind", SAVED)
def test_every_other_parameter_is_saved_and_loads(kind: str, tmp_path: Path) -> None:
    make, more = SAVED[kind]
    model, other = Model(make), Model(make)
    weights.save_diffusers(model, tmp_path)
    assert weights.SafeTensors(tmp_path).keys() == PLAIN | more
    nnx.update(other, nnx.map_state(lambda _, x: jax.tree.map(jnp.zeros_like, x), nnx.state(other)))
    weights.load_diffusers(other, tmp_path)
    for name, tensor in weights.to_diffusers(model).items():
        np.testing.assert_array_equal(weights.to_diffusers(other)[name], tensor)


def test_a_class_names_its_kernel() -> None:
    class Named(nnx.Einsum):
        diffusers_names = {"kernel": "weight"}  # noqa: RUF012

    model = Model(lambda rngs: Named("ab,bc->ac", (6, 4), rngs=rngs))
    assert weights.to_diffusers(model)["to_q.weight"].shape == (6, 4)
