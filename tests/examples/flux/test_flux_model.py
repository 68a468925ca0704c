"""Flux.1 at small sizes, with diffusers' weights: diffusers' numbers, on one device and on a mesh;
weights go in and out bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flux.model import FluxTransformer2D
from flux.sizes import SIZES, Sizes

import maxattn as ma
from maxattn import weights
from maxattn.errors import InputError, WeightsError
from tests.examples.parity import Tensors, compare, fixture, part
from tests.fixtures import make_diffusers as made
from tests.golden_text import check_golden
from tests.waiting import but
from tests.weights.test_diffusers import live

CASES = {"flux_dev": made.FLUX, "flux_schnell": made.SCHNELL}
PLAIN = ma.AttentionConfig()
CONFIGS = {"flux_dev": PLAIN.replace(remat_policy="SAVE_ATTENTION"), "flux_schnell": PLAIN}


def loaded(
    case: str, theirs: Tensors, config: ma.AttentionConfig, mesh: Any = None
) -> FluxTransformer2D:
    sizes = Sizes(**CASES[case])
    model = nnx.eval_shape(lambda: FluxTransformer2D(sizes, config, mesh, rngs=nnx.Rngs(0)))
    assert weights.load_diffusers(model, part(theirs, "weights."), mesh=mesh) == weights.Loaded()
    return model


def call(model: FluxTransformer2D, x: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
    guidance = jnp.asarray(made.FLUX_GUIDANCE) if model.sizes.guidance_embeds else None
    return model(x, jnp.asarray(made.TIMES), given["text"], given["pooled"], guidance)


# Without guidance it is the same with one embedding less.
@pytest.mark.parametrize("case", but(CASES, ["flux_dev"]))
def test_the_whole_model_is_diffusers(case: str) -> None:
    theirs = fixture(case)
    compare(loaded(case, theirs, CONFIGS[case]), theirs, call)


@pytest.mark.parametrize("case", CASES)
def test_the_whole_model_is_diffusers_live(case: str) -> None:
    theirs = live(case)
    compare(loaded(case, theirs, PLAIN), theirs, call)


# tests/examples/test_scan_layers.py has it on eight devices.
@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 1])
def test_on_eight_devices_it_is_the_same(tensor: int) -> None:
    config = PLAIN.replace(
        ici_data_parallelism=1,
        ici_fsdp_parallelism=2,
        ici_context_parallelism=4 // tensor,
        ici_tensor_parallelism=tensor,
        attention="ring",
    )
    mesh = config.make_mesh()
    theirs = fixture("flux_dev")
    model = loaded("flux_dev", theirs, config, mesh)
    kernel = model.single_transformer_blocks.norm.linear.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 8, 48 // tensor), "fsdp and tensor"
    compare(model, theirs, call)


@pytest.mark.parametrize("case", CASES)
def test_weights_come_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    theirs = part(fixture(case), "weights.")
    model = loaded(case, fixture(case), PLAIN)
    weights.save_diffusers(model, tmp_path)
    again = weights.SafeTensors(tmp_path)
    assert set(again) == set(theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(again[name][()], array, err_msg=name)


def test_a_missing_and_an_unknown_tensor_are_refused() -> None:
    theirs = part(fixture("flux_schnell"), "weights.")
    model = nnx.eval_shape(lambda: FluxTransformer2D(Sizes(**made.SCHNELL), rngs=nnx.Rngs(0)))
    with pytest.raises(WeightsError, match="guidance_embedder"):
        weights.load_diffusers(model, part(fixture("flux_dev"), "weights."))
    del theirs["single_transformer_blocks.2.proj_out.bias"]
    with pytest.raises(WeightsError, match=r"single_transformer_blocks\.2\.proj_out\.bias"):
        weights.load_diffusers(model, theirs)


@pytest.mark.parametrize(("name", "billions"), [("flux.1-dev", 11.90), ("flux.1-schnell", 11.89)])
def test_real_sizes(name: str, billions: float) -> None:
    model = nnx.eval_shape(lambda: FluxTransformer2D(SIZES[name], rngs=nnx.Rngs(0)))
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count / 1e9 == pytest.approx(billions, rel=0.001)


def test_what_does_not_fit_is_said() -> None:
    dev, schnell = (
        nnx.eval_shape(lambda s=s: FluxTransformer2D(Sizes(**s), rngs=nnx.Rngs(0)))
        for s in CASES.values()
    )
    x, t, text, pooled = jnp.ones((1, 4, 4, 4)), jnp.ones(1), jnp.ones((1, 3, 6)), jnp.ones((1, 5))
    for model, arguments, word in (
        (schnell, (jnp.ones((1, 4, 5, 4)), t, text, pooled), "multiples of 2"),
        (schnell, (jnp.ones((1, 4, 4, 16)), t, text, pooled), r"\[B, H, W, 4\]"),
        (schnell, (x, t, jnp.ones((1, 3, 5)), pooled), "text"),
        (schnell, (x, t, text, text), "pooled"),
        (schnell, (x, t, text, pooled, t), "guidance_embeds=False"),
        (dev, (x, t, text, pooled), "guidance_embeds=True"),
    ):
        with pytest.raises(InputError, match=word):
            nnx.eval_shape(lambda m, a=arguments: m(*a), model)


FOLDERS: dict[str, dict[str, Any]] = {
    "flux_of_another_class": {"_class_name": "ChromaTransformer2DModel"},
    "flux_of_another_family": {"_class_name": "WanTransformer3DModel", "num_layers": 30},
    "flux_fills_in": {"in_channels": 384, "out_channels": 64},
    "flux_patches": {"patch_size": 2},
    "flux_setting_unknown": {"num_layer": 19},
    "flux_axes": {"axes_dims_rope": [16, 56, 48]},
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_of_other_models_are_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FOLDERS[case]))
    with pytest.raises(WeightsError) as error:
        Sizes.of_folder(tmp_path)
    check_golden(f"generate/{case}", str(error.value))


def test_sizes_of_a_folder(tmp_path: Path) -> None:
    for sizes in (*SIZES.values(), Sizes(**made.FLUX)):
        (tmp_path / "config.json").write_text(json.dumps(sizes.config()))
        assert Sizes.of_folder(tmp_path) == sizes
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    assert Sizes.of_folder(tmp_path) == SIZES["flux.1-schnell"], "diffusers' default"
