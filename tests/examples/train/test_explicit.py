"""Training under meshes as `jax.make_mesh` makes them, with Explicit axes, equals one device."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import numpy as np
import pytest
from digits.drawing import draw_all
from digits.settings import Settings
from digits.training import train

from .conftest import Ran


@pytest.mark.parametrize(
    "how", ["ambient", *(pytest.param(x, marks=pytest.mark.slow) for x in ("passed", "both"))]
)
def test_the_losses_are_those_of_one_device(how: str, small: Settings, ran: Ran) -> None:
    mesh = jax.make_mesh((2, 2), ("fsdp", "context"), devices=jax.devices()[:4])
    with nullcontext() if how == "passed" else jax.set_mesh(mesh):
        model, losses = train(small, None if how == "ambient" else mesh)
        videos = draw_all(model, small) if how == "both" else None
    np.testing.assert_allclose(losses, ran.losses, rtol=1e-5)
    assert how != "both" or videos
