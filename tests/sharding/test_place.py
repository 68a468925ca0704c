"""`sharding.place` refuses arrays that it cannot move; messages: tests/golden/place.txt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import maxattn as ma
from maxattn.config import AttentionConfig
from maxattn.errors import MaxattnError
from maxattn.sharding import on_axes, place
from tests.golden_text import check_refused

MESH = AttentionConfig(ici_data_parallelism=1, ici_fsdp_parallelism=8).make_mesh


def layer() -> nnx.Linear:
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


ABSTRACT = AbstractMesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
REFUSED: dict[str, Callable[[], None]] = {
    "arrays": lambda: place({"a": jnp.ones(3)}, MESH()),
    "arrays_without_a_mesh": lambda: place({"a": jnp.ones(3)}, None),
    "state": lambda: place(nnx.state(layer()), MESH()),
    "without_arrays": lambda: place(nnx.eval_shape(layer), MESH()),
    "mesh_text": lambda: place(layer(), "fsdp"),  # type: ignore[arg-type]
    "mesh_sizes": lambda: place(layer(), {"fsdp": 8}),  # type: ignore[arg-type]
    "mesh_without_devices": lambda: place(layer(), ABSTRACT),  # type: ignore[arg-type]
    "mesh_of_other_axes": lambda: place(
        layer(), jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    check_refused(f"place/{name}", MaxattnError, REFUSED[name])


def test_kernels_that_stay_whole_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    names = on_axes("fsdp", "tensor")

    def model(**how: Any) -> nnx.Dict:
        up = nnx.Linear(32, 64, **how, rngs=nnx.Rngs(0))
        return nnx.Dict(attn=ma.FlaxAttention(32, 2, dim_head=8, rngs=nnx.Rngs(0)), up=up)

    small = ma.AttentionConfig(ici_context_parallelism=8).make_mesh()
    place(model(kernel_metadata=names), MESH())
    place(model(), small)  # nothing is split over context
    assert not caplog.records
    place(model(), MESH())
    place(model(), MESH())
    ma.weights.load_diffusers(nnx.eval_shape(model), ma.weights.to_diffusers(model()), mesh=MESH())
    assert len(caplog.records) == 1 and "up.kernel" in caplog.text and "on_axes" in caplog.text


def test_without_a_mesh_nothing_moves() -> None:
    module = layer()
    before = module.kernel[...]
    place(module, None)
    assert module.kernel[...] is before or module.kernel[...].sharding == before.sharding
