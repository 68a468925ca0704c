"""Tiny Wan 2.1, Flux.1 and SDXL, trained by the commands: steps, resuming, averages, LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import make_latents
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.flux.task import FluxTask
from maxattn_examples.samplers.discrete import Betas
from maxattn_examples.sdxl.task import min_snr_weights, noised, signal_and_noise
from maxattn_examples.train import flow, lora
from maxattn_examples.train.data import LatentFolder
from maxattn_examples.train.samples import channels
from maxattn_examples.train.settings import TrainingSettings
from maxattn_examples.train.step import Parts, Step, build, parts_of, schedule, split
from maxattn_examples.wan.task import WanTask
from PIL import Image
from safetensors.numpy import load_file

from maxattn import weights
from maxattn.errors import ConfigError
from tests.waiting import but
from tests.weights.test_fused import C, H, Model, N

from .made import FLUX, I2V, TASKS, WAN, batch_of, begin, flux, folder, losses, sdxl, wan
from .runs import arrays

STEPS = 12
MAKE = {"wan": (wan, WAN), "flux": (flux, FLUX)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Four examples per folder: with a batch of four, every batch has all of them."""
    path = tmp_path_factory.mktemp("data")
    return {kind: folder(path / kind, kind) for kind in ("wan", "flux", "sdxl", "i2v")}


# Flux.1's differs in the names of what is exported, which test_models.py compares.
@pytest.fixture(scope="module", params=but(MAKE, ["wan"]))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(kind: str, data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with its last two checkpoints; tests may read it, but not change it."""
    path, (make, sizes) = tmp_path_factory.mktemp("whole") / "run", MAKE[kind]
    more = {"steps": STEPS, "checkpoint_every": STEPS - 1, "tensorboard": True, "export": True}
    begin(make(path, sizes, data[kind], **more)).run()
    return path


# ---- a run ---------------------------------------------------------------------------------------


def test_the_loss_goes_down(whole: Path) -> None:
    found = losses(whole, STEPS)
    assert np.mean(found[-4:]) < 0.9 * np.mean(found[:4]), found


def test_the_average_follows_the_parameters(whole: Path) -> None:
    before, after = (arrays(whole.parent, step) for step in (STEPS - 1, STEPS))
    names = [name for name in after if "average" in name]
    assert len(names) > 20
    decay = min(0.5, (1 + STEPS - 1) / (10 + STEPS - 1))
    for name in names:
        wanted = decay * before[name] + (1 - decay) * after[name.replace("average", "trained")]
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-7)


EXPORTED = {
    "wan": ("blocks.1.attn1.to_q", "['blocks']['attn1']['to_q']['kernel']", "flow_shift", 3.0),
    "flux": (
        "single_transformer_blocks.1.proj_mlp",
        "['single_transformer_blocks']['proj_mlp']['kernel']",
        "use_dynamic_shifting",
        True,
    ),
}


def test_a_run_exports_the_average_as_diffusers_reads_it(kind: str, whole: Path, data: Any) -> None:
    layer, name, option, value = EXPORTED[kind]
    make, sizes = MAKE[kind]
    exported = load_file(whole / "transformer" / "diffusion_pytorch_model.safetensors")
    average = arrays(whole.parent, STEPS)[f"['average']{name}"]
    np.testing.assert_array_equal(exported[f"{layer}.weight"], average[1].T)
    again = make(whole, {"folder": str(whole), "dtype": "float32"}, data[kind])
    first, task = (TASKS[type(x)].of(x) for x in (make(whole, sizes, data[kind]), again))
    assert task.sizes == first.sizes
    parameters = nnx.to_pure_dict(nnx.state(build(task, None)))
    for key in name.strip("[]'").split("']['"):
        parameters = parameters[key]
    np.testing.assert_array_equal(parameters, average)
    scheduler = json.loads((whole / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler[option] == value
    with pytest.raises(ConfigError, match=r"model\.num_layers: 1\n.*has 2"):
        TASKS[type(again)].of(make(whole, sizes | {"folder": str(whole), "num_layers": 1}))


def test_a_run_writes_its_attention_and_its_scalars(kind: str, whole: Path) -> None:
    written = b"".join(path.read_bytes() for path in (whole / "tensorboard").iterdir())
    for name in (b"loss", b"learning_rate", b"gradient_norm", b"tokens_per_second"):
        assert b"training/" + name in written
    if kind == "wan":
        facts = whole / "checkpoints" / str(STEPS) / "facts" / "metadata"
        found = json.loads(facts.read_text())
        assert found["attention"]["self"][0].startswith("self-attention  B=4 T=S=8 N=2 H=12 f32")
        assert found["attention"]["cross"][0].startswith("cross-attention  B=4 T=8 S=3")
        assert found["plans"].keys() == {"self", "cross"}


@pytest.mark.parametrize("kind", ["wan"], scope="module", indirect=True)
def test_a_checkpoint_of_another_training_is_refused(whole: Path, tmp_path: Path) -> None:
    """Here the data differ; test_training.py has other settings."""
    other = folder(tmp_path / "other", "wan", count=5)
    with pytest.raises(ConfigError, match=r"(?s)data\.folder.*training\.resume=false"):
        begin(wan(whole, WAN, other, steps=STEPS)).run()


@pytest.mark.slow
def test_the_unet_learns_and_resumes_bit_for_bit(data: Any, tmp_path: Path) -> None:
    whole, halves = tmp_path / "a" / "run", tmp_path / "b" / "run"
    how = {"learning_rate": 1e-2, "export": True, "snr_gamma": 5.0}
    for path, steps in ((whole, 30), (halves, 10), (halves, 30)):
        settings = {"steps": steps, "checkpoint_every": steps, **how}
        begin(sdxl(path, {"prediction_type": "v_prediction"}, data["sdxl"], **settings)).run()
    found = losses(whole, 30)
    assert np.mean(found[-5:]) < 0.9 * np.mean(found[:5]), found
    ours, theirs = arrays(tmp_path / "b", 30), arrays(tmp_path / "a", 30)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    scheduler = json.loads((whole / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "v_prediction"
    assert (whole / "unet" / "diffusion_pytorch_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wan", "sdxl", "flux"])
def test_samples_are_drawn_along_the_way(kind: str, tmp_path: Path, data: Any) -> None:
    path, more = tmp_path / "run", {"picture_every": 2, "steps": 2}
    given, how = data[kind], {"num_inference_steps": 2, "count": 2}
    if kind != "flux":
        dims = ["--text-dim", "6", "--pooled-dim", "5", "--count", "4"]
        make_latents.main([given := str(tmp_path / "digits"), "--digits", kind, *dims])
    model = {"wan": WAN | {"in_channels": 16, "out_channels": 16}}.get(kind)
    settings = {"wan": wan, "sdxl": sdxl, "flux": flux}[kind](path, model, given, **more)
    how |= {"true_cfg_scale": 2.0} if kind == "flux" else {"guidance_scale": 2.0}
    begin(settings.replace(sampling=settings.sampling.replace(**how))).run()
    latents = load_file(path / "samples" / "0000002.safetensors")["latents"]
    shapes = {"wan": (2, 16, 5, 4, 4), "sdxl": (2, 4, 8, 8), "flux": (2, 4, 4, 8)}
    assert latents.shape == shapes[kind] and np.isfinite(latents).all()
    assert Image.open(path / "samples" / "0000002.png").size[0] > 15


# ---- LoRA, parts of a batch ----------------------------------------------------------------------


@pytest.mark.slow
def test_lora_learns_alone_and_merges_to_the_same_model(data: Any, tmp_path: Path) -> None:
    """For image-to-video the image's projections have LoRA too."""
    path, targets = tmp_path / "run", ["to_q", "to_v", "to_out", "add_k_proj"]
    how = {"lora_rank": 2, "lora_alpha": 6.0, "lora_targets": targets, "ema_decay": 0.0}
    how |= {"steps": 8, "learning_rate": 2e-2, "export": True}
    settings = wan(path, I2V, data["i2v"], **how)
    adapted, _ = begin(settings).run()
    names = arrays(tmp_path, 8)
    assert all("lora_" in x or "count" in x or "step" in x for x in names), list(names)
    base = build(WanTask.of(wan(path, I2V, data["i2v"])), None)
    after = dict(nnx.to_flat_state(nnx.state(adapted)))
    for where, variable in nnx.to_flat_state(nnx.state(base)):
        np.testing.assert_array_equal(after[where].get_value(), variable.get_value())
    assert sum(isinstance(module, lora.Adapted) for _, module in nnx.iter_modules(adapted)) == 3 + 4

    given = {name: jnp.asarray(array)[None] for name, array in LatentFolder(data["i2v"])[0].items()}
    x = jnp.moveaxis(jnp.concatenate([given["latents"], given["condition"]], axis=1), 1, -1)
    call = nnx.jit(lambda m: m(x, jnp.array([500.0]), given["text"], given["image"]))
    before, wanted = call(base), call(adapted)
    merged = nnx.eval_shape(lambda: WanTask.of(settings).build(None, nnx.Rngs(0)))
    lora.merge(adapted, merged)
    file = path / "pytorch_lora_weights.safetensors"
    assert len(weights.merge_lora(base, file, prefix="transformer.")) == 2 * (3 + 4)
    scale = float(jnp.abs(wanted).max())
    assert float(jnp.abs(wanted - before).max()) > 1e-3 * scale, "it has learned something"
    for model in (merged, base):
        np.testing.assert_allclose(call(model), wanted, atol=2e-5 * scale)


def test_a_new_adapter_changes_nothing_and_alpha_scales_it() -> None:
    linear, x = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 4))
    adapted = lora.Adapted(linear, 2, 3.0, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(adapted(x), linear(x))
    adapted.lora_B[...] = jnp.ones((2, 3))
    change = 3.0 * adapted.lora_A[...] @ jnp.ones((2, 3))
    np.testing.assert_allclose(adapted(x), linear(x) + x @ change, atol=1e-6)
    np.testing.assert_allclose(lora.change(adapted), change, rtol=1e-6)


@pytest.mark.slow
def test_what_is_trained_by_layers_is_written_as_diffusers_has_it() -> None:
    """If only some layers of a joint tensor have LoRA, merging it back gives the trained change."""
    model, plain = Model(0), Model(0)
    lora.add(model, 2, 4.0, ("to_q", "to_v"), rngs=nnx.Rngs(1))
    for _, module in lora.adapted(model):
        module.lora_B[...] = np.random.default_rng(3).normal(size=module.lora_B.shape)
    held = lora.to_diffusers(model, "transformer.")
    layers = ("one", "stacked.0", "stacked.1", "stacked.2")
    ends = {"lora_A": (4, C), "lora_B": (3 * N * H + 5, 4)}
    shapes = {f"transformer.{x}.to_all.{e}.weight": ends[e] for x in layers for e in ends}
    assert {name: x.shape for name, x in held.items()} == shapes
    lora.merge(model, merged := nnx.eval_shape(lambda: Model(0)))
    weights.merge_lora(plain, held)
    ours, theirs = weights.to_diffusers(plain), weights.to_diffusers(merged)
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name], x, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_parts_of_a_batch_have_the_gradients_of_the_whole(data: Any, tmp_path: Path) -> None:
    found = []
    for parts in (1, 2):
        how = {"gradient_accumulation_steps": parts}
        task = WanTask.of(wan(tmp_path, WAN | {"num_layers": 1}, data["wan"], **how))
        model = build(task, None)
        how, (trained, fixed) = Parts(model, 0), split(model, 0)
        empty = jax.tree.map(jnp.asarray, LatentFolder(data["wan"]).empty)
        examples = task.noised(batch_of(data["wan"]), empty, jax.random.key(0))
        step = Step(task, how, fixed, {}, None)
        found.append(jax.jit(step.gradients)(trained, fixed, examples))
    for one, both in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(both, one, atol=2e-5 * max(1e-3, np.abs(one).max()))
    rows = parts_of({"x": jnp.arange(6)}, 3)["x"]
    np.testing.assert_array_equal(rows, [[0, 3], [1, 4], [2, 5]])


RATES = [
    ("constant", 0, [1, 1, 1]),
    ("constant", 2, [0, 0.5, 1]),
    ("cosine", 0, [1, 0.505, 0.01]),
    ("cosine", 1, [0, 1, 0.01]),
]


@pytest.mark.parametrize(("kind", "warmup", "wanted"), RATES)
def test_the_learning_rate_warms_up(kind: Any, warmup: int, wanted: list[float]) -> None:
    how = {"learning_rate_schedule": kind, "warmup_steps": warmup, "steps": 2}
    rate = schedule(TrainingSettings(learning_rate=1.0, **how))
    np.testing.assert_allclose([float(rate(i)) for i in range(3)], wanted, rtol=1e-6)


# ---- the inputs of a step ------------------------------------------------------------------------


def test_flow_is_a_straight_line() -> None:
    clean, t = jnp.ones((2, 3)), jnp.array([0.0, 1.0])
    drawn = flow.noised(clean, t, jax.random.key(0))
    np.testing.assert_array_equal(drawn.mixed[0], clean[0])
    np.testing.assert_allclose(drawn.mixed[1] - drawn.velocity[1], clean[1], rtol=1e-6)
    even = flow.times(jax.random.key(1), 4000, 1.0, "uniform")
    assert abs(float(even.mean()) - 0.5) < 0.02
    assert float(flow.times(jax.random.key(1), 4000, 3.0, "uniform").mean()) > 0.6
    assert float(flow.times(jax.random.key(1), 4000, 1.0, mean=1.0, std=0.1).std()) < 0.03


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_unet_s_target_gives_the_picture_back(prediction: Any) -> None:
    betas = Betas(prediction_type=prediction)
    clean = jax.random.normal(jax.random.key(0), (64, 2, 2, 3))
    drawn = noised(clean, jax.random.key(1), betas)
    a, s = (x[:, None, None, None] for x in signal_and_noise(drawn.times, betas))
    is_noise = prediction == "epsilon"
    of_noise, of_v = (drawn.mixed - s * drawn.target) / a, a * drawn.mixed - s * drawn.target
    np.testing.assert_allclose(of_noise if is_noise else of_v, clean, atol=1e-3)
    ratio = np.asarray(a / s).squeeze() ** 2
    wanted = np.minimum(ratio, 5.0) / (ratio if is_noise else ratio + 1)
    np.testing.assert_allclose(min_snr_weights(drawn.times, 5.0, betas), wanted, rtol=1e-5)
    assert (min_snr_weights(drawn.times, None, betas) == 1).all()


def test_some_texts_are_dropped(data: Any, tmp_path: Path) -> None:
    batch = batch_of(data["wan"], 256)
    task = WanTask.of(wan(tmp_path, WAN, data["wan"], condition_dropout=0.25))
    empty = LatentFolder(data["wan"]).empty
    drawn = jax.jit(task.noised)(batch, empty, jax.random.key(0))
    dropped = np.asarray((drawn["text"] == 0.5).all(axis=(1, 2)))
    assert 0.15 < dropped.mean() < 0.35
    np.testing.assert_array_equal(drawn["text"][~dropped], batch["text"][~dropped])


def test_flux_is_given_its_guidance_its_times_and_dropped_texts(data: Any, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def model(x: Any, t: Any, text: Any, pooled: Any, guidance: Any) -> Any:
        seen.update(t=t, guidance=guidance, text=text)
        return jnp.zeros_like(x)

    how = {"embedded_guidance": 1.5, "condition_dropout": 0.5}
    for sizes, is_guided in ((FLUX, True), (FLUX | {"sizes": "flux.1-schnell"}, False)):
        task: Any = FluxTask.of(flux(tmp_path, sizes, data["flux"], **how))
        empty = LatentFolder(data["flux"]).empty
        examples = jax.jit(task.noised)(batch_of(data["flux"]), empty, jax.random.key(1))
        wanted = float(jnp.mean(examples["velocity"] ** 2))
        assert float(task.loss(model, examples)) == pytest.approx(wanted, rel=1e-6)
        np.testing.assert_allclose(seen["t"], 1000 * examples["times"], rtol=1e-6)
        assert (seen["guidance"] == 1.5).all() if is_guided else seen["guidance"] is None
        dropped = np.asarray((examples["text"] == 0.5).all(axis=(1, 2)))
        assert 0 < dropped.sum() < 4
        np.testing.assert_array_equal((examples["pooled"] == 0.5).all(axis=1), dropped)


def test_a_picture_of_channels_has_every_channel_of_some_frames() -> None:
    latents = np.random.default_rng(0).standard_normal((2, 16, 9, 6, 10)).astype(np.float32)
    picture = channels(latents)
    assert picture.shape == (2 * (4 * 6 + 4), 6 * (4 * 10 + 4)) and picture.dtype == np.uint8
