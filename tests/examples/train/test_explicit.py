"""Training under meshes as `jax.make_mesh` makes them, with Explicit axes, equals one device."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest
from digits.drawing import draw_all
from digits.settings import Settings
from digits.training import train


def into(settings: Settings, folder: Path) -> Settings:
    return settings.replace(training=settings.training.replace(output_dir=str(folder)))


@pytest.mark.parametrize(
    "how", ["ambient", *(pytest.param(x, marks=pytest.mark.slow) for x in ("passed", "both"))]
)
def test_the_losses_are_those_of_one_device(how: str, small: Settings, tmp_path: Path) -> None:
    _, alone = train(into(small, tmp_path / "alone"))
    mesh = jax.make_mesh((2, 2), ("fsdp", "context"), devices=jax.devices()[:4])
    with nullcontext() if how == "passed" else jax.set_mesh(mesh):
        model, losses = train(small, None if how == "ambient" else mesh)
        videos = draw_all(model, small) if how == "both" else None
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert how != "both" or videos
