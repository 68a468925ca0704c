"""Training one of Wan 2.2's two transformers: its weights, times and name, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.random_folder import forms_of, save_random
from maxattn_examples.train import flow, lora
from maxattn_examples.train.data import LatentFolder, batches
from maxattn_examples.train.step import build, optimizer
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.task import WanTask
from safetensors.numpy import load_file

from maxattn import weights
from maxattn.errors import ConfigError
from tests.golden_text import check_golden

from .made import WAN, begin, folder, wan

INDEX = {
    "_class_name": "WanPipeline",
    "boundary_ratio": 0.6,
    "transformer_2": ["diffusers", "WanTransformer3DModel"],
}
PARTS = {"high_noise": "transformer", "low_noise": "transformer_2"}
# make test-all trains the first transformer too, which other models have alone.
ONE = [pytest.param("high_noise", marks=pytest.mark.slow), "low_noise"]
MODEL, ONE_LAYER = {"dtype": "float32"}, {"num_layers": 1}
EXACT = {"ema_decay": 0.0, "condition_dropout": 0.25, "export": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder(tmp_path_factory.mktemp("data") / "data", "wan")


@pytest.fixture
def pipeline(written: Path, tmp_path: Path) -> Path:
    """A copy of the pipeline, which a test may change."""
    return Path(shutil.copytree(written, tmp_path / "pipeline"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pipeline of two transformers with different weights."""
    path = tmp_path_factory.mktemp("written") / "pipeline"
    task = WanTask.of(wan(path.parent, WAN | ONE_LAYER))
    forms = forms_of(nnx.eval_shape(lambda: task.build(None, nnx.Rngs(0))))
    for part in PARTS.values():
        save_random(forms, path / part, 2**30, part)
        (path / part / "config.json").write_text(json.dumps(task.sizes.config()))
    (path / "model_index.json").write_text(json.dumps(INDEX))
    return path


def settings(path: Path, pipeline: Path, data: str, expert: str | None, **training: Any) -> Any:
    model = MODEL | {"folder": str(pipeline)}
    return wan(path, model, data, expert=expert, **EXACT | training)


# ---- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [("uniform",), ("logit_normal", 0.7, 1.3)])
@pytest.mark.parametrize("within", [(0.875, 1.0), (0.0, 0.875), (0.3, 0.4)])
def test_times_of_an_expert_are_those_of_all_that_lie_in_its_range(how: Any, within: Any):
    """Their quantiles equal those of times drawn from the full range and then filtered."""
    found = np.asarray(flow.times(jax.random.key(1), 40_000, 3.0, *how, within=within))
    assert found.dtype == np.float32 and found.min() >= within[0]
    assert found.max() < within[1] or within[1] == 1
    every = np.asarray(flow.times(jax.random.key(2), 400_000, 3.0, *how))
    kept = every[(every >= within[0]) & (every < within[1])]
    quantiles = np.linspace(0.05, 0.95, 19)
    off = np.quantile(found, quantiles) - np.quantile(kept, quantiles)
    assert np.abs(off).max() < 0.02 * (within[1] - within[0]), off


@pytest.mark.parametrize("mean", [-40.0, 40.0])
def test_times_far_from_all_that_are_likely_stay_in_the_range(mean: float):
    found = flow.times(jax.random.key(0), 100, 1.0, mean=mean, within=(0.4, 0.6))
    assert np.isfinite(found).all() and found.min() >= 0.4 and found.max() < 0.6


# ---- what is learned -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("expert", ONE)
def test_an_expert_learns_as_a_plain_loop_does(expert: str, tmp_path, pipeline: Path, data: str):
    """Losses and parameters equal those of a plain loop on its own weights, at its own times."""
    said = settings(tmp_path / "run", pipeline, data, expert, steps=3)
    model, losses = begin(said).run()
    plain, wanted = plain_training(said, pipeline / PARTS[expert], data, expert)
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    # AdamW moves a weight by its rate whatever the gradient's size: of small ones rounding counts.
    moved = 3 * said.training.learning_rate
    for one, other in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, plain)), strict=True):
        np.testing.assert_allclose(one, other, atol=0.03 * moved)
    held = load_file(tmp_path / "run" / PARTS[expert] / "diffusion_pytorch_model.safetensors")
    kernel = model.blocks.attn1.to_q.kernel[...]
    np.testing.assert_array_equal(held["blocks.0.attn1.to_q.weight"], kernel[0].T)
    others = set(PARTS.values()) - {PARTS[expert]}
    assert not any((tmp_path / "run" / other).exists() for other in others)


def plain_training(said: Any, weights_of: Path, data: str, expert: str) -> Any:
    """Train without the loop and the task: only the model, its loss and the optimizer."""
    sizes = WanTask.of(said).sizes
    model = nnx.eval_shape(lambda: WanTransformer3D(sizes, rngs=nnx.Rngs(0)))
    weights.load_diffusers(model, weights_of)
    graph, trained = nnx.split(model)
    params, adamw, losses = nnx.to_pure_dict(trained), optimizer(said.training), []
    # As what a step returns, so that every step is one program.
    params, moments = jax.device_put((params, adamw.init(params)), jax.devices()[0])
    examples = batches(LatentFolder(data), 4, said.training.seed)

    def merged(params: Any) -> WanTransformer3D:
        nnx.replace_by_pure_dict(trained, params)
        return nnx.merge(graph, trained)

    def loss(params: Any, clean: Any, text: Any, t: Any, noise: Any) -> jax.Array:
        mix = t[:, None, None, None, None]
        velocity = merged(params)((1 - mix) * clean + mix * noise, 1000 * t, text)
        return jnp.mean((velocity - (noise - clean)) ** 2)

    @jax.jit
    def stepped(params: Any, moments: Any, *batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, moments = adamw.update(gradient, moments, params)
        return jax.tree.map(jnp.add, params, updates), moments, value

    for step in range(said.training.steps):
        batch = next(examples)
        clean = np.moveaxis(batch["latents"], 1, -1)
        t, noise, dropped = drawn(said, clean.shape, step, expert)
        text = jnp.where(dropped[:, None, None], 0.5, batch["text"])
        params, moments, value = stepped(params, moments, clean, text, t, noise)
        losses.append(float(value))
    return merged(params), losses


def drawn(said: Any, shape: tuple[int, ...], step: int, expert: str) -> tuple[Any, Any, Any]:
    """Draw a step's times, noise and dropped texts."""
    key = jax.random.fold_in(jax.random.key(said.training.seed), step)
    for_times, for_noise, for_texts = jax.random.split(key, 3)
    within = {"high_noise": (0.6, 1.0), "low_noise": (0.0, 0.6)}[expert]
    t = flow.times(for_times, shape[0], 3.0, within=within)
    dropped = jax.random.bernoulli(for_texts, 0.25, (shape[0],))
    return t, jax.random.normal(for_noise, shape), dropped


@pytest.mark.slow
@pytest.mark.parametrize("expert", ONE)
def test_lora_of_an_expert_has_the_names_that_diffusers_reads(
    expert: str, tmp_path: Path, pipeline: Path, data: str
):
    """diffusers reads the second transformer's LoRA under the first's names, from its own file.

    A run resumes only with the same expert.
    """
    said = settings(tmp_path / "run", pipeline, data, expert, lora_rank=2, learning_rate=2e-2)
    adapted, _ = begin(said).run()
    number = "_2" if expert == "low_noise" else ""
    (written,) = (tmp_path / "run").glob("*.safetensors")
    assert written.name == f"pytorch_lora_weights{number}.safetensors"
    assert all(name.startswith("transformer.blocks.") for name in load_file(written))
    task = WanTask.of(said)
    base, merged = build(task, None), nnx.eval_shape(lambda: task.build(None, nnx.Rngs(0)))
    weights.merge_lora(base, written)
    lora.merge(adapted, merged)
    ours, wanted = weights.to_diffusers(base), weights.to_diffusers(merged)
    for name, array in wanted.items():
        np.testing.assert_allclose(ours[name], array, atol=2e-6, err_msg=name)
    other = next(name for name in PARTS if name != expert)
    with pytest.raises(ConfigError, match=rf"training\.expert: {other}\n.*made with {expert}"):
        begin(settings(tmp_path / "run", pipeline, data, other, lora_rank=2)).run()


# ---- what is refused -----------------------------------------------------------------------------


ONE_OF_TWO = json.dumps({"_class_name": "WanPipeline"})
A_SHARE_OF_1000 = json.dumps(INDEX | {"boundary_ratio": 875})
SDXL = json.dumps({"_class_name": "StableDiffusionXLPipeline"})
HIGH, LOW = {"expert": "high_noise"}, {"expert": "low_noise"}
T2V, I2V = (WAN | {"sizes": f"wan-2.2-{name}-a14b"} for name in ("t2v", "i2v"))
WAN_2_1 = WAN | {"sizes": "wan-2.1-t2v-14b"}
# The model beside the folder, the folder's part, its index ("": none, None: as it is), and the
# training.
REFUSALS: dict[str, tuple[dict[str, Any], str | None, str | None, dict[str, Any]]] = {
    "nothing_named": (MODEL, "", None, {}),
    "one_transformer": (MODEL, "", ONE_OF_TWO, LOW),
    "one_transformer_and_no_index": (MODEL, "", "", LOW | {"boundary_ratio": 0.875}),
    "the_other_one_s_folder": (MODEL, "transformer", None, LOW | {"boundary_ratio": 0.6}),
    "another_boundary": (MODEL, "", None, HIGH | {"boundary_ratio": 0.875}),
    "no_boundary": (MODEL, "transformer", None, HIGH),
    "no_share": (MODEL, "", A_SHARE_OF_1000, HIGH),
    "pictures": (MODEL, "", None, HIGH | {"picture_every": 2}),
    "two_and_no_index": (MODEL, "", "", {}),
    "named_and_no_expert": (T2V, None, None, {}),
    "named_wan_2_1": (WAN_2_1, "", None, HIGH),
    "named_of_one_transformer": (WAN, None, None, HIGH | {"boundary_ratio": 0.9}),
    "no_folder": (I2V, "nowhere", None, LOW),
    "folder_of_another_family": (T2V, "", SDXL, {}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_expert_that_is_not_there_or_not_named(case: str, tmp_path, pipeline: Path, data: str):
    model, part, text, training = REFUSALS[case]
    if text is not None:
        (pipeline / "model_index.json").write_text(text)
    if text == "":
        (pipeline / "model_index.json").unlink()
    if case == "one_transformer_and_no_index":
        shutil.rmtree(pipeline / "transformer_2")
    if part is not None:
        model = model | {"folder": str(pipeline / part)}
    more = EXACT if model.keys() <= {*MODEL, "folder"} else {}
    with pytest.raises(ConfigError) as error:
        begin(wan(tmp_path / "run", model, data, **more | training))
    check_golden(f"training/expert_{case}", str(error.value).replace(str(tmp_path), "."))
    assert not (tmp_path / "run").exists()


def test_a_new_model_takes_the_boundary_of_its_name(tmp_path: Path):
    for name, at in (("t2v", 0.875), ("i2v", 0.9)):
        said = wan(tmp_path, WAN | {"sizes": f"wan-2.2-{name}-a14b"}, expert="low_noise")
        assert WanTask.of(said).times == (0.0, at)
