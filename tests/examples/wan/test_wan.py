"""Wan 2.1 at small sizes, with diffusers' weights: diffusers' numbers, on one device and on a
mesh.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from samplers import sample, start, step, unipc
from wan.model import WanTransformer3D
from wan.sizes import SIZES, Sizes

import maxattn as ma
from maxattn import weights
from maxattn.errors import InputError, WeightsError
from tests.examples.parity import channels_last, compare, fixture, part
from tests.fixtures import make_diffusers as made
from tests.waiting import but
from tests.weights.test_diffusers import live

CASES = {"wan_t2v": {}, "wan_i2v_model": made.IMAGE, "wan_ti2v": {}}
TIMES = {"wan_ti2v": made.FRAME_TIMES}
CONFIGS = {
    "plain": ma.AttentionConfig(),
    "remat": ma.AttentionConfig(remat_policy="SAVE_ATTENTION"),
}


def loaded(
    case: str, theirs: dict[str, np.ndarray], config: ma.AttentionConfig, mesh: Any = None
) -> WanTransformer3D:
    sizes = Sizes(**(made.MODEL | CASES[case]))
    model = nnx.eval_shape(lambda: WanTransformer3D(sizes, config, mesh, rngs=nnx.Rngs(0)))
    found = part(theirs, "weights.") | {
        "blocks.0.attn2.norm_added_q.weight": np.zeros(24, np.float32)
    }
    weights.load_diffusers(model, found, mesh=mesh)
    return model


def call(
    model: WanTransformer3D, x: jax.Array, given: dict[str, jax.Array], times: Any = made.TIMES
) -> jax.Array:
    return model(x, jnp.asarray(times), given["text"], given.get("image"))


def call_of(case: str) -> Any:
    """Call a case's model: with a time for each video, or for each of its frames."""
    return partial(call, times=TIMES.get(case, made.TIMES))


# Of images, which has all that text alone has; tests/examples/sample has whole runs of the others.
@pytest.mark.parametrize("case", but(CASES, ["wan_i2v_model"]))
def test_the_whole_model_is_diffusers(case: str) -> None:
    theirs = fixture(case)
    compare(loaded(case, theirs, CONFIGS["remat"]), theirs, call_of(case))


@pytest.mark.parametrize("case", CASES)
def test_the_whole_model_is_diffusers_live(case: str) -> None:
    theirs = live(case)
    compare(loaded(case, theirs, CONFIGS["plain"]), theirs, call_of(case))


# Times of each frame meet meshes in test_wan_forcing_meshes.py, whole runs in examples/sample.
@pytest.mark.slow
@pytest.mark.parametrize("case", ["wan_t2v", "wan_ti2v"])
def test_on_a_mesh_it_is_the_same(case: str) -> None:
    config = ma.AttentionConfig(
        ici_data_parallelism=1,
        ici_fsdp_parallelism=2,
        ici_context_parallelism=2,
        ici_tensor_parallelism=2,
        attention="ring",
    )
    theirs = fixture(case)
    model = loaded(case, theirs, config, config.make_mesh())
    kernel = model.blocks.attn1.to_q.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 12, 12), (
        "layers whole; [in, out] over fsdp and tensor"
    )
    compare(model, theirs, call_of(case))


def test_text_is_encoded_once_for_all_steps() -> None:
    theirs = fixture("wan_i2v_model")
    model, given = loaded("wan_i2v_model", theirs, CONFIGS["plain"]), part(theirs, "in.")
    kv = nnx.jit(lambda m: m.encode(jnp.asarray(given["text"]), jnp.asarray(given["image"])))(model)
    assert kv.k.shape == (2, 2, 512, 2, 12)
    assert kv.image_k.shape == (2, 2, 5, 2, 12)
    out = nnx.jit(lambda m, x, kv: m(x, jnp.asarray(made.TIMES), kv=kv))(
        model, channels_last(given["x"]), kv
    )
    np.testing.assert_allclose(
        np.moveaxis(np.asarray(out), -1, 1), theirs["out"], atol=2e-5 * np.abs(theirs["out"]).max()
    )


# Whole runs of tests/examples/sample sample so.
@pytest.mark.slow
@pytest.mark.parametrize("config", ["remat", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_sampler_closes_over_the_model(config: str) -> None:
    """The steps of `sample`, in `lax.scan`, are those taken one by one through `nnx.jit`."""
    theirs = fixture("wan_t2v")
    model, given = loaded("wan_t2v", theirs, CONFIGS[config]), part(theirs, "in.")
    kv, noise = model.encode(jnp.asarray(given["text"])), channels_last(given["x"])
    call = nnx.jit(lambda model, x, t: model(x, jnp.full((2,), t), kv=kv))
    schedule = unipc.schedule(steps=3, shift=3.0)
    state = start(schedule, noise)
    for i in range(3):
        state = step(schedule, i, state, lambda x, t: call(model, x, t))
    drawn = sample(lambda x, t: model(x, jnp.full((2,), t), kv=kv), noise, schedule)
    np.testing.assert_allclose(drawn, state.x, atol=1e-5 * float(jnp.abs(state.x).max()))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("wan-2.1-t2v-1.3b", 1.42),
        ("wan-2.1-t2v-14b", 14.29),
        ("wan-2.1-i2v-14b", 16.4),
        ("wan-2.2-ti2v-5b", 5.0),
    ],
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
        ((x, jnp.ones((1, 4)), text), "each of 1 frames of tokens"),
    ):
        with pytest.raises(InputError, match=word):
            nnx.eval_shape(lambda m, a=arguments: m(*a), model)
    with pytest.raises(WeightsError, match=r"config\.json"):
        Sizes.of_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    with pytest.raises(WeightsError, match="WanTransformer3DModel"):
        Sizes.of_folder(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"num_layers": 7, "patch_size": [1, 2, 2], "rope_max_seq_len": 1024}'
    )
    assert Sizes.of_folder(tmp_path) == replace(SIZES["wan-2.1-t2v-14b"], num_layers=7)
