"""Models with scanned layers and with separate ones: one function, one folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common.scan import are_scanned, scan_here
from common.xla_options import sampling_options
from flax import nnx
from flux.model import FluxTransformer2D
from flux.sizes import Sizes as FluxSizes
from sdxl.sizes import Sizes as UNetSizes
from sdxl.unet import UNet
from train import lora
from train.settings import TrainingSettings
from wan.model import WanTransformer3D

import maxattn as ma
from maxattn import weights
from tests.examples.wan.streamed import SIZES as WAN
from tests.fixtures import make_diffusers as made
from tests.moved import moved
from tests.waiting import but

PLAIN = ma.AttentionConfig()
REMAT = PLAIN.replace(remat_policy="SAVE_ATTENTION")
H200 = ma.Target.named("NVIDIA H200")


def wan(scan: bool, config: ma.AttentionConfig = PLAIN, mesh: Any = None) -> WanTransformer3D:
    return WanTransformer3D(WAN, config, mesh, scan_layers=scan, rngs=nnx.Rngs(0))


def flux(scan: bool, config: ma.AttentionConfig = PLAIN, mesh: Any = None) -> FluxTransformer2D:
    sizes = FluxSizes(**made.FLUX)
    return FluxTransformer2D(sizes, config, mesh, scan_layers=scan, rngs=nnx.Rngs(0))


def unet(scan: bool, config: ma.AttentionConfig = PLAIN, mesh: Any = None) -> UNet:
    return UNet(UNetSizes(**made.UNET), config, mesh, scan_layers=scan, rngs=nnx.Rngs(0))


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def call_wan(model: Any) -> jax.Array:
    kv = model.encode(draw(1, 3, 8, seed=1))
    return model(draw(1, 3, 2, 4, 4), jnp.full((1, 3), 400.0), kv=kv)


def call_flux(model: Any) -> jax.Array:
    sizes = model.sizes
    told = draw(2, 3, sizes.joint_attention_dim), draw(2, sizes.pooled_projection_dim)
    t, guidance = jnp.array([100.0, 700.0]), jnp.array([3.5, 1.0])
    return model(draw(2, 8, 4, sizes.channels), t, *told, guidance)


def call_unet(model: Any) -> jax.Array:
    sizes = model.sizes
    kv = model.encode(draw(1, 3, sizes.cross_attention_dim))
    latents = draw(1, 8, 8, sizes.in_channels)
    return model(latents, jnp.array([300.0]), None, draw(1, sizes.pooled_dim), draw(1, 6), kv)


Case = tuple[Callable[..., Any], Callable[[Any], jax.Array]]
CASES: dict[str, Case] = {
    "wan": (wan, call_wan),
    "flux": (flux, call_flux),
    "sdxl": (unet, call_unet),
}


def both(make: Callable[..., Any], config: ma.AttentionConfig = PLAIN, mesh: Any = None) -> Any:
    """Make the scanned model, every parameter random, and one with its weights and no scan.

    They are copies, which tests may change.
    """
    return tuple(map(nnx.clone, drawn(make, config, mesh)))


@cache
def drawn(make: Callable[..., Any], config: ma.AttentionConfig, mesh: Any) -> Any:
    scanned = make(True, config)
    nnx.update(scanned, moved(nnx.state(scanned, nnx.Param)))
    alone = nnx.eval_shape(lambda: make(False, config, mesh))
    weights.load_diffusers(alone, weights.to_diffusers(scanned), mesh=mesh)
    return scanned, alone


def gradients(model: Any, call: Callable[[Any], jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
    """Return the output, and the gradients of its squares by diffusers' names."""

    @nnx.jit
    def run(model: Any) -> Any:
        def loss(model: Any) -> Any:
            out = call(model)
            return jnp.mean(out**2), out

        (_, out), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        return out, grads

    out, grads = run(model)
    holder = nnx.clone(model)
    nnx.update(holder, grads)
    return out, weights.to_diffusers(holder)


def close(got: Any, want: Any) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert np.abs(got - want).max() <= 3e-6 * max(np.abs(want).max(), 1e-3)


def test_new_layers_have_the_same_weights() -> None:
    one, other = (weights.to_diffusers(wan(scan)) for scan in (True, False))
    assert sorted(one) == sorted(other)
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-6, err_msg=name)


# Flux and SDXL compile for a minute; test_models.py compares their numbers with diffusers.
@pytest.mark.parametrize("name", but(CASES, ["wan"]))
def test_outputs_and_gradients_are_those_of_scanned_layers(name: str) -> None:
    make, call = CASES[name]
    scanned, alone = both(make, REMAT)
    (want, grads), (got, found) = (gradients(model, call) for model in (scanned, alone))
    close(got, want)
    assert sorted(found) == sorted(grads)
    for key, value in grads.items():
        close(found[key], value)


def test_only_scanned_layers_are_in_a_loop() -> None:
    for scan in (True, False):
        graph, state = nnx.split(nnx.eval_shape(lambda scan=scan: wan(scan)))
        text = str(jax.make_jaxpr(lambda s, g=graph: call_wan(nnx.merge(g, s)))(state))
        assert ("length=2" in text) is scan, "a scan over layers"


def test_a_folder_is_the_same_whichever_wrote_it(tmp_path: Path) -> None:
    scanned, alone = both(flux)
    files = []
    for name, model in (("scanned", scanned), ("alone", alone)):
        weights.save_diffusers(model, tmp_path / name)
        files.append({p.name: p.read_bytes() for p in sorted((tmp_path / name).iterdir())})
    assert files[0] == files[1]


def test_each_layers_weights_lie_over_the_mesh_and_give_the_same() -> None:
    sizes = {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}
    names = {f"ici_{axis}_parallelism": n for axis, n in sizes.items()}
    config = PLAIN.replace(**names, attention="ring")
    mesh = config.make_mesh()
    scanned, _ = both(flux)
    _, alone = both(flux, config, mesh)
    kernel = alone.single_transformer_blocks[0].proj_mlp.kernel[...]
    width_in, width_out = kernel.shape
    assert kernel.sharding.shard_shape(kernel.shape) == (width_in // 2, width_out // 2)
    close(nnx.jit(call_flux)(alone), nnx.jit(call_flux)(scanned))


def test_changes_by_lora_have_the_same_names_and_merge_alike() -> None:
    scanned, alone = both(wan)
    found = []
    for model in (scanned, alone):
        lora.add(model, 2, None, TrainingSettings().lora_targets, rngs=nnx.Rngs(1))
        found.append(lora.to_diffusers(model))
    assert {k: v.shape for k, v in found[0].items()} == {k: v.shape for k, v in found[1].items()}
    change = {name: np.asarray(draw(*value.shape)) for name, value in found[0].items()}
    merged = []
    for model in both(wan):
        weights.merge_lora(model, change)
        merged.append(weights.to_diffusers(model))
    for name, value in merged[0].items():
        np.testing.assert_array_equal(merged[1][name], value, err_msg=name)


def test_a_gpu_that_samples_scans_nothing_unless_it_is_told() -> None:
    assert scan_here(None) and scan_here(True) and not scan_here(False)
    with H200.assumed():
        assert not scan_here(None) and scan_here(True)
    assert are_scanned(wan(True).blocks) and not are_scanned(wan(False).blocks)


def test_on_a_gpu_products_stay_apart_unless_it_is_told() -> None:
    apart, triton = "xla_gpu_dot_merger_threshold_mb", "xla_gpu_enable_triton_gemm"
    assert sampling_options([]) == {}
    with H200.assumed():
        assert sampling_options([]) == {apart: 0, triton: False}
        assert sampling_options([f"{apart}=32"]) == {apart: "32", triton: False}
