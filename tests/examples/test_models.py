"""Small Wan, SDXL and Flux.1 with diffusers' weights give diffusers' numbers, on meshes too.

Also real sizes, and inputs and folders that are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.flux.model import FluxTransformer2D
from maxattn_examples.flux.settings import SIZES as FLUX_SIZES
from maxattn_examples.flux.settings import Sizes as FluxSizes
from maxattn_examples.sdxl.settings import Sizes as UNetSizes
from maxattn_examples.sdxl.unet import UNet
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.settings import SIZES as WAN_SIZES
from maxattn_examples.wan.settings import Sizes as WanSizes

import maxattn as ma
from maxattn import weights
from maxattn.errors import InputError, WeightsError
from maxattn.modules import KV
from tests.examples.parity import channels_last, channels_second, compare, fixture, part
from tests.fixtures import make_diffusers as made
from tests.golden_text import check_refused
from tests.waiting import but
from tests.weights.test_diffusers import live

PLAIN = ma.AttentionConfig()
Given = dict[str, jax.Array]


def call_wan(model: Any, x: jax.Array, given: Given, times: Any = made.TIMES) -> jax.Array:
    return model(x, jnp.asarray(times), given["text"], given.get("image"))


def call_unet(model: Any, x: jax.Array, given: Given) -> jax.Array:
    picture = jnp.asarray(made.PICTURE)
    return model(x, jnp.asarray(made.TIMES), given["text"], given["pooled"], picture)


def call_flux(model: Any, x: jax.Array, given: Given) -> jax.Array:
    guidance = jnp.asarray(made.FLUX_GUIDANCE) if model.sizes.guidance_embeds else None
    return model(x, jnp.asarray(made.TIMES), given["text"], given["pooled"], guidance)


class Case(NamedTuple):
    """A model's class and sizes, its call, and its remat policy."""

    model: Callable[..., nnx.Module]
    sizes: Any
    call: Callable[..., jax.Array]
    policy: str = "NONE"


I2V = WanSizes(**(made.MODEL | made.IMAGE))
call_frames = partial(call_wan, times=made.FRAME_TIMES)
CASES = {
    "wan_t2v": Case(WanTransformer3D, WanSizes(**made.MODEL), call_wan),
    "wan_i2v_model": Case(WanTransformer3D, I2V, call_wan, "SAVE_ATTENTION"),
    "wan_ti2v": Case(WanTransformer3D, WanSizes(**made.MODEL), call_frames),
    "sdxl_unet": Case(UNet, UNetSizes(**made.UNET), call_unet),
    "flux_dev": Case(FluxTransformer2D, FluxSizes(**made.FLUX), call_flux, "SAVE_ATTENTION"),
    "flux_schnell": Case(FluxTransformer2D, FluxSizes(**made.SCHNELL), call_flux),
}


@cache
def shapes(
    case: str, config: ma.AttentionConfig = PLAIN, mesh: Any = None, scan: bool = True
) -> Any:
    """Return a model without arrays; tests fill a clone of it."""
    of = CASES[case]
    return nnx.eval_shape(
        lambda: of.model(of.sizes, config, mesh, scan_layers=scan, rngs=nnx.Rngs(0))
    )


def loaded(case: str, *how: Any, mesh: Any = None, scan: bool = True) -> Any:
    """Return a model with the weights of its fixture; `how` is a config."""
    model, tensors = nnx.clone(shapes(case, *how, mesh=mesh, scan=scan)), of_fixture(case)
    if case.startswith("wan"):  # written by diffusers for models without an image, too
        tensors["blocks.0.attn2.norm_added_q.weight"] = np.zeros(24, np.float32)
    weights.load_diffusers(model, tensors, mesh=mesh)
    return model


def of_fixture(case: str, prefix: str = "weights.") -> Any:
    return part(fixture(case), prefix)


# ---- diffusers' numbers --------------------------------------------------------------------------


# The others have an input less, and the UNet compiles for long: tests/examples/sample has whole
# runs of them.
@pytest.mark.parametrize("case", but(CASES, ["wan_i2v_model"]))
def test_a_whole_model_is_diffusers(case: str) -> None:
    config = PLAIN.replace(remat_policy=CASES[case].policy)
    compare(loaded(case, config), fixture(case), CASES[case].call)


# Flux and SDXL compile for a minute.
@pytest.mark.slow
@pytest.mark.parametrize("case", but(["wan_t2v", "flux_dev", "sdxl_unet"], ["wan_t2v"]))
def test_layers_that_are_not_scanned_are_diffusers(case: str) -> None:
    model = loaded(case, PLAIN.replace(remat_policy="SAVE_ATTENTION"), scan=False)
    compare(model, fixture(case), CASES[case].call)


@pytest.mark.parametrize("case", CASES)
def test_a_whole_model_is_diffusers_live(case: str) -> None:
    theirs = live(case)
    model = nnx.clone(shapes(case))
    weights.load_diffusers(model, part(theirs, "weights."))
    compare(model, theirs, CASES[case].call)


@pytest.mark.parametrize("case", but(CASES, ["wan_i2v_model", "flux_dev"]))
def test_a_model_promotes_no_rank(case: str) -> None:
    theirs = fixture(case)
    given = {key: jnp.asarray(value) for key, value in part(theirs, "in.").items()}
    x = channels_last(theirs["in.x"])
    with jax.numpy_rank_promotion("raise"):
        nnx.eval_shape(lambda model: CASES[case].call(model, x, given), shapes(case))


CONTEXT = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 2, "attention": "ring"}
ON_MESHES = {
    "wan_t2v": {"ici_context_parallelism": 2, "ici_tensor_parallelism": 2},
    "wan_ti2v": {"ici_context_parallelism": 2, "ici_tensor_parallelism": 2},
    "sdxl_unet": {"ici_context_parallelism": 4},
    "flux_dev": {"ici_context_parallelism": 2, "ici_tensor_parallelism": 2},
}


# test_scan_layers.py has a model on eight devices, examples/maxattn_examples/sample whole runs.
@pytest.mark.slow
@pytest.mark.parametrize("case", ON_MESHES)
def test_on_a_mesh_it_is_the_same(case: str) -> None:
    config = PLAIN.replace(**CONTEXT, **ON_MESHES[case])
    model = loaded(case, config, mesh=config.make_mesh())
    if case.startswith("wan"):
        kernel = model.blocks.attn1.to_q.kernel[...]
        shard = kernel.sharding.shard_shape(kernel.shape)
        assert shard == (2, 12, 12), "layers whole; [in, out] over fsdp and tensor"
    compare(model, fixture(case), CASES[case].call)


@pytest.mark.parametrize(
    "case", ["wan_i2v_model", pytest.param("sdxl_unet", marks=pytest.mark.slow)]
)
def test_text_is_encoded_once_for_all_steps(case: str) -> None:
    theirs, model = fixture(case), loaded(case)
    given = {name: jnp.asarray(x) for name, x in part(theirs, "in.").items()}
    x, t = channels_last(theirs["in.x"]), jnp.asarray(made.TIMES)
    if case == "sdxl_unet":
        kv = nnx.jit(UNet.encode)(model, given["text"])
        # Down: one of one layer and one of two; the middle; up: two of each.
        counted = [x.k.shape[:3] for x in kv if isinstance(x, KV)]
        assert counted == [(n, 2, 5) for n in (1, 2, 2, 2, 2, 1, 1)]
        told = (None, given["pooled"], jnp.asarray(made.PICTURE), kv)
        out = nnx.jit(lambda m, x, told: m(x, t, *told))(model, x, told)
    else:
        kv = nnx.jit(lambda m: m.encode(given["text"], given["image"]))(model)
        assert kv.k.shape == (2, 2, 512, 2, 12) and kv.image_k.shape == (2, 2, 5, 2, 12)
        out = nnx.jit(lambda m, x, kv: m(x, t, kv=kv))(model, x, kv)
    scale = np.abs(theirs["out"]).max()
    np.testing.assert_allclose(channels_second(out), theirs["out"], atol=2e-5 * scale)


@pytest.mark.parametrize("case", ["flux_dev", "flux_schnell"])
def test_weights_come_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    weights.save_diffusers(loaded(case), tmp_path)
    again, theirs = weights.SafeTensors(tmp_path), part(fixture(case), "weights.")
    assert set(again) == set(theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(again[name][()], array, err_msg=name)


BILLIONS = {
    "wan-2.1-t2v-1.3b": 1.42,
    "wan-2.1-t2v-14b": 14.29,
    "wan-2.1-i2v-14b": 16.4,
    "wan-2.2-ti2v-5b": 5.0,
    "flux.1-dev": 11.90,
    "flux.1-schnell": 11.89,
    "sdxl": 2.567463684,
}


@pytest.mark.parametrize("name", but(BILLIONS, lambda name: name != "sdxl"))
def test_real_sizes(name: str) -> None:
    if name == "sdxl":
        model: Any = nnx.eval_shape(lambda: UNet(rngs=nnx.Rngs(0)))
    elif name in WAN_SIZES:
        model = nnx.eval_shape(lambda: WanTransformer3D(WAN_SIZES[name], rngs=nnx.Rngs(0)))
    else:
        model = nnx.eval_shape(lambda: FluxTransformer2D(FLUX_SIZES[name], rngs=nnx.Rngs(0)))
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.004 if "wan" in name else 0.001)


# ---- refused inputs ------------------------------------------------------------------------------


ONE, FLUX_TEXT, POOLED = jnp.ones(1), jnp.ones((1, 3, 6)), jnp.ones((1, 5))
LATENTS, WAN_TEXT = jnp.ones((1, 4, 4, 4)), jnp.ones((1, 3, 8))
VIDEO = LATENTS[:, None]
UNET = {"latents": jnp.ones((2, 8, 8, 4)), "t": jnp.ones(2), "pooled": jnp.ones((2, 5))}
UNET |= {"picture": jnp.ones((2, 6)), "text": jnp.ones((2, 5, 6))}
# The model, what it is called with, and words of the message.
REFUSED: list[tuple[str, Any, str]] = [
    ("wan_t2v", (jnp.ones((1, 4, 1, 4, 4)), ONE, WAN_TEXT), "patch"),
    ("wan_t2v", (jnp.ones((1, 1, 4, 4, 5)), ONE, WAN_TEXT), "channels"),
    ("wan_t2v", (VIDEO, ONE, WAN_TEXT, jnp.ones((1, 5, 10))), "text-to-video"),
    ("wan_t2v", (VIDEO, ONE), "exactly one of text and kv"),
    ("wan_t2v", (VIDEO, jnp.ones((1, 4)), WAN_TEXT), "each of 1 frames of tokens"),
    ("sdxl_unet", UNET | {"latents": jnp.ones((2, 8, 6, 4))}, "latents"),
    ("sdxl_unet", UNET | {"pooled": jnp.ones((2, 4))}, "pooled"),
    ("sdxl_unet", UNET | {"picture": jnp.ones((1, 6))}, "picture"),
    ("sdxl_unet", UNET | {"text": None}, "exactly one of text and kv"),
    ("sdxl_unet", UNET | {"text": None, "kv": ()}, "0 of them"),
    ("flux_schnell", (jnp.ones((1, 4, 5, 4)), ONE, FLUX_TEXT, POOLED), "multiples of 2"),
    ("flux_schnell", (jnp.ones((1, 4, 4, 16)), ONE, FLUX_TEXT, POOLED), r"\[B, H, W, 4\]"),
    ("flux_schnell", (LATENTS, ONE, jnp.ones((1, 3, 5)), POOLED), "text"),
    ("flux_schnell", (LATENTS, ONE, FLUX_TEXT, FLUX_TEXT), "pooled"),
    ("flux_schnell", (LATENTS, ONE, FLUX_TEXT, POOLED, ONE), "guidance_embeds=False"),
    ("flux_dev", (LATENTS, ONE, FLUX_TEXT, POOLED), "guidance_embeds=True"),
]


@pytest.mark.parametrize(("case", "given", "words"), REFUSED)
def test_inputs_that_do_not_fit_are_refused(case: str, given: Any, words: str) -> None:
    args, named = ((), given) if isinstance(given, dict) else (given, {})
    with pytest.raises(InputError, match=words):
        nnx.eval_shape(lambda model: model(*args, **named), shapes(case))


# ---- folders and weights -------------------------------------------------------------------------


def test_a_missing_and_an_unknown_tensor_are_refused() -> None:
    model, theirs = nnx.clone(shapes("flux_schnell")), part(fixture("flux_schnell"), "weights.")
    with pytest.raises(WeightsError, match="guidance_embedder"):
        weights.load_diffusers(model, part(fixture("flux_dev"), "weights."))
    del theirs["single_transformer_blocks.2.proj_out.bias"]
    with pytest.raises(WeightsError, match=r"single_transformer_blocks\.2\.proj_out\.bias"):
        weights.load_diffusers(model, theirs)


FOLDERS: dict[str, dict[str, Any]] = {
    "flux_of_another_class": {"_class_name": "ChromaTransformer2DModel"},
    "flux_of_another_family": {"_class_name": "WanTransformer3DModel", "num_layers": 30},
    "flux_fills_in": {"in_channels": 384, "out_channels": 64},
    "flux_patches": {"patch_size": 2},
    "flux_setting_unknown": {"num_layer": 19},
    "flux_axes": {"axes_dims_rope": [16, 56, 48]},
}


def write(path: Path, **values: Any) -> Path:
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_of_other_models_are_refused(case: str, tmp_path: Path) -> None:
    folder = write(tmp_path, **FOLDERS[case])
    check_refused(f"generate/{case}", WeightsError, FluxSizes.of_folder, folder)
