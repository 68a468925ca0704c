"""Wan 2.1 at small sizes, with diffusers' weights: diffusers' numbers, on one device and on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from wan21.model import WanTransformer3D
from wan21.sizes import SIZES, Sizes

import maxattn as ma
from maxattn import weights
from maxattn.errors import InputError, WeightsError
from tests.fixtures import make_diffusers as made
from tests.weights.test_diffusers import FOLDER

CASES = {"wan_t2v": {}, "wan_i2v_model": made.IMAGE}
CONFIGS = {"plain": ma.AttentionConfig(), "remat": ma.AttentionConfig(remat_policy="SAVE_ATTENTION")}


def part(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def loaded(case: str, theirs: dict[str, np.ndarray], config: ma.AttentionConfig, mesh: Any = None) -> WanTransformer3D:
    sizes = Sizes(**(made.MODEL | CASES[case]))
    model = nnx.eval_shape(lambda: WanTransformer3D(sizes, config, mesh, rngs=nnx.Rngs(0)))
    found = part(theirs, "weights.") | {"blocks.0.attn2.norm_added_q.weight": np.zeros(24, np.float32)}
    weights.load_diffusers(model, found, mesh=mesh)
    return model


def channels_last(x: np.ndarray) -> jax.Array:
    return jnp.moveaxis(jnp.asarray(x), 1, -1)


def results(model: WanTransformer3D, theirs: dict[str, np.ndarray]):
    """Return output and gradients, in diffusers' layouts."""
    given = part(theirs, "in.")
    t, text = jnp.asarray(made.TIMES), jnp.asarray(given["text"])
    image = jnp.asarray(given["image"]) if "image" in given else None
    dout = channels_last(theirs["dout"])

    @nnx.jit
    def both(model: WanTransformer3D, x: jax.Array):
        def loss(model: WanTransformer3D, x: jax.Array):
            out = model(x, t, text, image)
            return jnp.sum(out * dout), out

        (_, out), grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, x)
        return out, grads

    out, (by_weights, by_x) = both(model, channels_last(given["x"]))
    nnx.update(model, by_weights)
    gradients = weights.to_diffusers(model) | {"in.x": np.moveaxis(np.asarray(by_x), -1, 1)}
    return np.moveaxis(np.asarray(out), -1, 1), gradients


def compare(got: tuple[np.ndarray, dict[str, np.ndarray]], theirs: dict[str, np.ndarray]) -> None:
    out, gradients = got
    np.testing.assert_allclose(out, theirs["out"], atol=2e-5 * np.abs(theirs["out"]).max())
    assert {f"grad.{key}" for key in gradients} == {key for key in theirs if key.startswith("grad.")}
    for key, value in gradients.items():
        want = theirs[f"grad.{key}"]
        np.testing.assert_allclose(value, want, atol=1e-4 * max(np.abs(want).max(), 1e-3), err_msg=key)


@pytest.mark.parametrize("case", CASES)
def test_the_whole_model_is_diffusers(case: str) -> None:
    theirs = load_file(FOLDER / f"diffusers_{case}.safetensors")
    compare(results(loaded(case, theirs, CONFIGS["remat"]), theirs), theirs)


def test_on_a_mesh_it_is_the_same() -> None:
    config = ma.AttentionConfig(
        ici_data_parallelism=1, ici_fsdp_parallelism=2, ici_context_parallelism=2, ici_tensor_parallelism=2,
        attention="ring",
    )  # fmt: skip
    theirs = load_file(FOLDER / "diffusers_wan_t2v.safetensors")
    model = loaded("wan_t2v", theirs, config, config.make_mesh())
    kernel = model.blocks.attn1.to_q.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 12, 12), "layers whole; [in, out] over fsdp and tensor"
    compare(results(model, theirs), theirs)


def test_text_is_encoded_once_for_all_steps() -> None:
    theirs = load_file(FOLDER / "diffusers_wan_i2v_model.safetensors")
    model, given = loaded("wan_i2v_model", theirs, CONFIGS["plain"]), part(theirs, "in.")
    kv = nnx.jit(lambda m: m.encode(jnp.asarray(given["text"]), jnp.asarray(given["image"])))(model)
    assert kv.k.shape == (2, 2, 512, 2, 12)
    assert kv.image_k.shape == (2, 2, 5, 2, 12)
    out = nnx.jit(lambda m, x, kv: m(x, jnp.asarray(made.TIMES), kv=kv))(model, channels_last(given["x"]), kv)
    np.testing.assert_allclose(
        np.moveaxis(np.asarray(out), -1, 1), theirs["out"], atol=2e-5 * np.abs(theirs["out"]).max()
    )


@pytest.mark.parametrize(
    ("name", "billions"), [("wan-2.1-t2v-1.3b", 1.42), ("wan-2.1-t2v-14b", 14.29), ("wan-2.1-i2v-14b", 16.4)]
)
def test_real_sizes(name: str, billions: float) -> None:
    model = nnx.eval_shape(lambda: WanTransformer3D(SIZES[name], rngs=nnx.Rngs(0)))
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count / 1e9 == pytest.approx(billions, rel=0.005)


def test_what_does_not_fit_is_said(tmp_path) -> None:
    sizes = Sizes(**made.MODEL)
    model = nnx.eval_shape(lambda: WanTransformer3D(sizes, rngs=nnx.Rngs(0)))
    x, t, text = jnp.ones((1, 1, 4, 4, 4)), jnp.ones(1), jnp.ones((1, 3, 8))
    for arguments, word in (
        ((jnp.ones((1, 4, 1, 4, 4)), t, text), "patch"),
        ((jnp.ones((1, 1, 4, 4, 5)), t, text), "channels"),
        ((x, t, text, jnp.ones((1, 5, 10))), "text-to-video"),
        ((x, t), "exactly one of text and kv"),
    ):
        with pytest.raises(InputError, match=word):
            nnx.eval_shape(lambda m, a=arguments: m(*a), model)
    with pytest.raises(WeightsError, match=r"config\.json"):
        Sizes.of_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    with pytest.raises(WeightsError, match="WanTransformer3DModel"):
        Sizes.of_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"num_layers": 7, "patch_size": [1, 2, 2], "rope_max_seq_len": 1024}')
    assert Sizes.of_folder(tmp_path) == Sizes(num_layers=7)
