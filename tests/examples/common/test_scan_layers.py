"""Models with scanned and with separate layers: one folder, one LoRA, and which is the default.

Models are also split into a structure and arrays. test_models.py compares with diffusers.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.common.compiled import sampling_options, scan_here, split
from maxattn_examples.train import lora
from maxattn_examples.train.settings import TrainingSettings
from maxattn_examples.wan.model import WanTransformer3D

import maxattn as ma
from maxattn import sharding, weights
from maxattn.steps import are_stacked
from tests.examples.parity import channels_last, channels_second
from tests.examples.test_models import CASES, PLAIN, loaded, of_fixture, shapes
from tests.examples.wan.streamed import SIZES, small

H200 = ma.Target.named("NVIDIA H200")


def wan(scan: bool) -> WanTransformer3D:
    return WanTransformer3D(SIZES, scan_layers=scan, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_new_layers_have_the_same_weights() -> None:
    one, other = (weights.to_diffusers(wan(scan)) for scan in (True, False))
    assert sorted(one) == sorted(other)
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-6, err_msg=name)


def test_only_scanned_layers_are_in_a_loop() -> None:
    given = of_fixture("wan_t2v", "in.")
    x = channels_last(given["x"])
    for scan in (True, False):
        graph, state = nnx.split(shapes("wan_t2v", scan=scan))
        text = str(
            jax.make_jaxpr(lambda s, g=graph: CASES["wan_t2v"].call(nnx.merge(g, s), x, given))(
                state
            )
        )
        assert ("length=2" in text) is scan, "a scan over layers"


def test_a_folder_is_the_same_whichever_wrote_it(tmp_path: Path) -> None:
    files = []
    for scan in (True, False):
        weights.save_diffusers(loaded("flux_dev", scan=scan), tmp_path / str(scan))
        files.append({p.name: p.read_bytes() for p in sorted((tmp_path / str(scan)).iterdir())})
    assert files[0] == files[1]


@pytest.mark.slow
def test_each_layers_weights_lie_over_the_mesh_and_give_the_same() -> None:
    sizes = {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}
    names = {f"ici_{axis}_parallelism": n for axis, n in sizes.items()}
    config = PLAIN.replace(**names, attention="ring")
    model = loaded("flux_dev", config, mesh=config.make_mesh(), scan=False)
    kernel = model.single_transformer_blocks[0].proj_mlp.kernel[...]
    width_in, width_out = kernel.shape
    assert kernel.sharding.shard_shape(kernel.shape) == (width_in // 2, width_out // 2)
    given = {name: jnp.asarray(x) for name, x in of_fixture("flux_dev", "in.").items()}
    out = nnx.jit(CASES["flux_dev"].call)(model, channels_last(given["x"]), given)
    want = of_fixture("flux_dev", "out")[""]
    np.testing.assert_allclose(channels_second(out), want, atol=2e-5 * np.abs(want).max())


@pytest.mark.slow
def test_changes_by_lora_have_the_same_names_and_merge_alike() -> None:
    rng, shapes_of = np.random.default_rng(0), []
    for scan in (True, False):
        model = wan(scan)
        lora.add(model, 2, None, TrainingSettings().lora_targets, rngs=nnx.Rngs(1))
        shapes_of.append({name: x.shape for name, x in lora.to_diffusers(model).items()})
    assert shapes_of[0] == shapes_of[1]
    change = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes_of[0].items()}
    merged = []
    for scan in (True, False):
        weights.merge_lora(model := loaded("wan_t2v", scan=scan), change)
        merged.append(weights.to_diffusers(model))
    for name, value in merged[0].items():
        np.testing.assert_array_equal(merged[1][name], value, err_msg=name)


@pytest.mark.slow
def test_a_gpu_that_samples_scans_nothing_unless_it_is_told() -> None:
    assert scan_here(None) and scan_here(True) and not scan_here(False)
    with H200.assumed():
        assert not scan_here(None) and scan_here(True)
    assert are_stacked(wan(True).blocks) and not are_stacked(wan(False).blocks)


def test_on_a_gpu_products_stay_apart_unless_it_is_told() -> None:
    apart, triton = "xla_gpu_dot_merger_threshold_mb", "xla_gpu_enable_triton_gemm"
    assert sampling_options([]) == {}
    with H200.assumed():
        assert sampling_options([]) == {apart: 0, triton: False}
        assert sampling_options([f"{apart}=32"]) == {apart: "32", triton: False}


# ---- a model as a structure and its arrays -------------------------------------------------------


def test_a_model_put_together_again_computes_the_same() -> None:
    model, given = loaded("flux_dev"), of_fixture("flux_dev", "in.")
    structure, leaves = split(model)
    x, call = channels_last(given["x"]), CASES["flux_dev"].call
    found = jax.jit(lambda leaves: call(structure.merge(leaves), x, given))(leaves)
    want = of_fixture("flux_dev", "out")[""]
    np.testing.assert_allclose(channels_second(found), want, atol=2e-5 * np.abs(want).max())


def test_arrays_keep_their_places_on_a_mesh() -> None:
    mesh = ma.AttentionConfig(
        ici_fsdp_parallelism=2, ici_context_parallelism=2, ici_tensor_parallelism=2
    ).make_mesh()
    model = small(mesh)
    sharding.place(model, mesh)
    structure, leaves = split(model)
    for one, other in zip(leaves, jax.tree.leaves(nnx.state(model)), strict=True):
        assert one is other
    again = jax.tree.leaves(nnx.state(structure.merge(leaves)))
    assert [x.sharding for x in again] == [x.sharding for x in leaves]
    assert any(not x.is_fully_replicated for x in leaves)


@pytest.mark.parametrize("shapes", [False, True])
def test_models_that_are_built_alike_share_a_structure(shapes: bool) -> None:
    one = split(small())[0]
    other, leaves = split(nnx.eval_shape(small) if shapes else small())
    assert one == other and hash(one) == hash(other)
    assert isinstance(leaves[0], jax.ShapeDtypeStruct if shapes else jax.Array)
    assert one != split(small(scan_layers=False))[0]
