"""The SDXL UNet at small sizes, with diffusers' weights: diffusers' numbers, on one device and on a
mesh.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sdxl.sizes import Sizes
from sdxl.unet import UNet

import maxattn as ma
from maxattn import weights
from maxattn.errors import InputError, WeightsError
from maxattn.modules import KV
from tests.examples.parity import Tensors, channels_last, channels_second, compare, fixture, part
from tests.fixtures import make_diffusers as made
from tests.weights.test_diffusers import live

# Each further config is a further model of shapes, which takes as long as a small one's forward.
CONFIG = ma.AttentionConfig()
REMAT = ma.AttentionConfig(remat_policy="FULL")


@cache
def shapes(config: ma.AttentionConfig, mesh: Any = None) -> UNet:
    """Return a model without arrays; tests fill a clone of it."""
    return nnx.eval_shape(lambda: UNet(Sizes(**made.UNET), config, mesh, rngs=nnx.Rngs(0)))


def loaded(theirs: Tensors, config: ma.AttentionConfig, mesh: Any = None) -> UNet:
    model = nnx.clone(shapes(config, mesh))
    weights.load_diffusers(model, part(theirs, "weights."), mesh=mesh)
    return model


def call(model: UNet, x: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
    return model(
        x, jnp.asarray(made.TIMES), given["text"], given["pooled"], jnp.asarray(made.PICTURE)
    )


# Remat leaves the numbers as they are; text_is_encoded_once has a forward without it.
@pytest.mark.parametrize(
    "config", [pytest.param(CONFIG, marks=pytest.mark.slow), REMAT], ids=["plain", "remat"]
)
def test_the_whole_unet_is_diffusers(config: ma.AttentionConfig) -> None:
    theirs = fixture("sdxl_unet")
    compare(loaded(theirs, config), theirs, call)


def test_the_whole_unet_is_diffusers_live() -> None:
    theirs = live("sdxl_unet")
    compare(loaded(theirs, ma.AttentionConfig()), theirs, call)


# Whole runs of tests/examples/sample encode it once.
@pytest.mark.slow
def test_text_is_encoded_once_for_all_steps() -> None:
    theirs = fixture("sdxl_unet")
    unet, given = loaded(theirs, CONFIG), part(theirs, "in.")
    kv = nnx.jit(UNet.encode)(unet, jnp.asarray(given["text"]))
    # Down: one of one layer and one of two; the middle; up: two of each.
    counted = [x.k.shape[:3] for x in kv if isinstance(x, KV)]
    assert counted == [(n, 2, 5) for n in (1, 2, 2, 2, 2, 1, 1)]
    pooled, picture = jnp.asarray(given["pooled"]), jnp.asarray(made.PICTURE)
    step = nnx.jit(lambda m, x, kv: m(x, jnp.asarray(made.TIMES), None, pooled, picture, kv))
    out = channels_second(step(unet, channels_last(given["x"]), kv))
    np.testing.assert_allclose(out, theirs["out"], atol=2e-5 * np.abs(theirs["out"]).max())


@pytest.mark.slow
def test_on_a_mesh_it_is_the_same() -> None:
    config = ma.AttentionConfig(
        ici_data_parallelism=1, ici_fsdp_parallelism=2, ici_context_parallelism=4, attention="ring"
    )
    theirs = fixture("sdxl_unet")
    compare(loaded(theirs, config, config.make_mesh()), theirs, call)


@pytest.mark.slow
def test_real_size() -> None:
    model = nnx.eval_shape(lambda: UNet(rngs=nnx.Rngs(0)))
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count == 2_567_463_684
    assert len(weights.entries(model)) == 1680


def test_what_does_not_fit_is_said(tmp_path) -> None:
    model = shapes(CONFIG)
    good = {
        "latents": jnp.ones((2, 8, 8, 4)),
        "pooled": jnp.ones((2, 5)),
        "picture": jnp.ones((2, 6)),
    }
    for wrong in (
        {"latents": jnp.ones((2, 8, 6, 4))},
        {"pooled": jnp.ones((2, 4))},
        {"picture": jnp.ones((1, 6))},
    ):
        with pytest.raises(InputError, match=next(iter(wrong))):  # before any array is asked for
            model(t=jnp.ones(2), text=jnp.ones((2, 5, 6)), **(good | wrong))
    wrong = {"exactly one of text and kv": (None, None), "0 of them": (None, ())}
    for words, (text, kv) in wrong.items():
        with pytest.raises(InputError, match=words):
            model(t=jnp.ones(2), text=text, kv=kv, **good)
    with pytest.raises(WeightsError, match=r"config\.json"):
        Sizes.of_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"addition_embed_type": null}')
    with pytest.raises(WeightsError, match="text_time"):
        Sizes.of_folder(tmp_path)
    said = {key: value for key, value in Sizes().config().items() if key != "norm_eps"}
    (tmp_path / "config.json").write_text(json.dumps({**said, "sample_size": 128}))
    assert Sizes.of_folder(tmp_path) == Sizes()
