"""Wan 2.1 and SDXL, tiny, trained by the commands: what is learned, resumed, averaged, adapted and
exported.
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
from safetensors.numpy import load_file
from samplers.betas import Betas
from sdxl import noise
from sdxl.task import SdxlTask
from train import flow, lora, state
from train.latents import LatentFolder
from train.loop import Training
from train.optimizer import schedule
from train.samples import channels
from train.settings import TrainingSettings
from train.state import Parts
from train.step import Step, parts_of
from wan.model import WanTransformer3D
from wan.task import WanTask

from maxattn import weights
from maxattn.errors import ConfigError
from maxattn.remat import POLICIES

from .made import I2V, WAN, folder, sdxl, wan
from .runs import arrays

LORA = {
    "lora_rank": 2,
    "lora_alpha": 6.0,
    "lora_targets": ["to_q", "to_v", "to_out", "add_k_proj"],
    "ema_decay": 0.0,
}
STEPS = 16


def train(settings: Any, mesh: Any = None) -> Any:
    """Do what the commands do, on one device: here, there are eight."""
    kind = WanTask if hasattr(settings.training, "timestep_shift") else SdxlTask
    return Training(kind.of(settings), mesh).run()


def losses(path: Path, step: int) -> list[float]:
    return json.loads((path / "checkpoints" / str(step) / "facts" / "metadata").read_text())[
        "losses"
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four examples: with a batch of four, every batch is all of them."""
    return folder(tmp_path_factory.mktemp("data") / "wan", "wan")


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a stop, and its last two checkpoints; tests may read it, not change it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    more = {"steps": STEPS, "checkpoint_every": STEPS - 1, "tensorboard": True, "export": True}
    train(wan(path, WAN, data, **more))
    return path


# ---- Wan 2.1 -------------------------------------------------------------------------------------


def test_the_loss_goes_down(whole: Path):
    found = losses(whole, STEPS)
    assert np.mean(found[-4:]) < 0.9 * np.mean(found[:4]), found


def test_the_attention_stands_beside_the_checkpoint(whole: Path):
    held = json.loads((whole / "checkpoints" / str(STEPS) / "facts" / "metadata").read_text())
    assert held["attention"]["self"][0].startswith("self-attention  B=4 T=S=8 N=2 H=12 f32")
    assert held["attention"]["cross"][0].startswith("cross-attention  B=4 T=8 S=3")
    assert held["plans"].keys() == {"self", "cross"}


def test_the_average_follows_the_parameters(whole: Path):
    before, after = (arrays(whole.parent, step) for step in (STEPS - 1, STEPS))
    names = [name for name in after if "average" in name]
    assert len(names) > 20
    decay = min(0.5, (1 + STEPS - 1) / (10 + STEPS - 1))
    for name in names:
        wanted = decay * before[name] + (1 - decay) * after[name.replace("average", "trained")]
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-7)


def test_what_is_exported_is_the_average_as_diffusers_reads_it(whole: Path, data: str):
    exported = load_file(whole / "transformer" / "diffusion_pytorch_model.safetensors")
    average = arrays(whole.parent, STEPS)["['average']['blocks']['attn1']['to_q']['kernel']"]
    np.testing.assert_array_equal(exported["blocks.1.attn1.to_q.weight"], average[1].T)
    again = wan(whole, {"folder": str(whole), "dtype": "float32"}, data)
    assert WanTask.of(again).sizes == WanTask.of(wan(whole, WAN, data)).sizes
    model = state.build(WanTask.of(again), None)
    assert isinstance(model, WanTransformer3D)
    np.testing.assert_array_equal(model.blocks.attn1.to_q.kernel[...], average)
    assert (
        json.loads((whole / "scheduler" / "scheduler_config.json").read_text())["flow_shift"] == 3.0
    )


def test_scalars_are_there_for_tensorboard(whole: Path):
    written = b"".join(path.read_bytes() for path in (whole / "tensorboard").iterdir())
    for name in (b"loss", b"learning_rate", b"gradient_norm", b"tokens_per_second"):
        assert b"training/" + name in written


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": WAN | {"ffn_dim": 24}}, ("model.ffn_dim: 24", "was made with 16")),
        ({"lora_rank": 2}, ("training.lora_rank: 2", "was made with 0")),
        ({"data": "other"}, ("data.folder", "training.resume=false")),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(
    whole: Path, data: str, tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]
):
    said = {"model": WAN, "data": data, "steps": STEPS} | change
    if said["data"] == "other":
        said["data"] = folder(tmp_path / "other", "wan", count=5)
    with pytest.raises(ConfigError) as error:
        train(wan(whole, **said))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.slow
def test_parts_of_a_batch_give_the_whole_ones_gradients(data: str, tmp_path: Path):
    found = []
    for parts in (1, 2):
        task = WanTask.of(
            wan(tmp_path, WAN | {"num_layers": 1}, data, gradient_accumulation_steps=parts)
        )
        model = state.build(task, None)
        how, (trained, fixed) = Parts(model, 0), state.split(model, 0)
        step = Step(task, how, fixed, {}, None)
        source = LatentFolder(data)
        batch = {name: jnp.stack([source[i][name] for i in range(4)]) for name in source.shapes}
        examples = task.noised(batch, jax.tree.map(jnp.asarray, source.empty), jax.random.key(0))
        found.append(jax.jit(step.gradients)(trained, fixed, examples))
    for one, both in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(both, one, atol=2e-5 * max(1e-3, np.abs(one).max()))
    rows = parts_of({"x": jnp.arange(6)}, 3)["x"]
    np.testing.assert_array_equal(rows, [[0, 3], [1, 4], [2, 5]])


# ---- LoRA, image to video ------------------------------------------------------------------------


@pytest.mark.slow
def test_lora_learns_alone_and_merges_to_the_same_model(tmp_path: Path):
    """For image-to-video: the image's projections are adapted as well."""
    path, data = tmp_path / "run", folder(tmp_path / "data", "i2v")
    settings = wan(path, I2V, data, steps=8, learning_rate=2e-2, export=True, **LORA)
    adapted, _ = train(settings)
    assert losses(path, 8)[-1] != losses(path, 8)[0]
    held = arrays(tmp_path, 8)
    assert held and all("lora_" in name or "count" in name or "step" in name for name in held), (
        list(held)
    )

    base = state.build(WanTask.of(wan(path, I2V, data)), None)
    frozen = nnx.to_flat_state(nnx.state(base))
    now = {where: variable.get_value() for where, variable in nnx.to_flat_state(nnx.state(adapted))}
    assert all((now[where] == variable.get_value()).all() for where, variable in frozen), (
        "nothing else has moved"
    )
    assert sum(isinstance(module, lora.Adapted) for _, module in nnx.iter_modules(adapted)) == 3 + 4

    given = {name: jnp.asarray(array)[None] for name, array in LatentFolder(data)[0].items()}
    x = jnp.concatenate([given["latents"], given["condition"]], axis=1)
    call = nnx.jit(
        lambda m: m(jnp.moveaxis(x, 1, -1), jnp.array([500.0]), given["text"], given["image"])
    )
    before, wanted = call(base), call(adapted)
    lora.merge(
        adapted, merged := nnx.eval_shape(lambda: WanTask.of(settings).build(None, nnx.Rngs(0)))
    )
    layers = weights.merge_lora(
        base, path / "pytorch_lora_weights.safetensors", prefix="transformer."
    )
    assert len(layers) == 2 * (3 + 4)
    scale = float(jnp.abs(wanted).max())
    assert float(jnp.abs(wanted - before).max()) > 1e-3 * scale, "it has learned something"
    for model in (merged, base):
        np.testing.assert_allclose(call(model), wanted, atol=2e-5 * scale)


def test_a_change_is_nothing_at_first_and_scaled_by_alpha():
    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    adapted, x = lora.Adapted(linear, 2, 3.0, rngs=nnx.Rngs(1)), jnp.ones((1, 4))
    np.testing.assert_array_equal(adapted(x), linear(x))
    adapted.lora_B[...] = jnp.ones((2, 3))
    np.testing.assert_allclose(
        adapted(x), linear(x) + 3.0 * (x @ adapted.lora_A[...]) @ jnp.ones((2, 3)), rtol=1e-6
    )
    np.testing.assert_allclose(
        lora.change(adapted), 3.0 * adapted.lora_A[...] @ jnp.ones((2, 3)), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("kind", "warmup", "wanted"),
    [
        ("constant", 0, [1, 1, 1]),
        ("constant", 2, [0, 0.5, 1]),
        ("cosine", 0, [1, 0.505, 0.01]),
        ("cosine", 1, [0, 1, 0.01]),
    ],
)
def test_the_learning_rate_warms_up(kind: Any, warmup: int, wanted: list[float]):
    steps = 2
    said = {
        "learning_rate": 1.0,
        "learning_rate_schedule": kind,
        "warmup_steps": warmup,
        "steps": steps,
    }
    rate = schedule(TrainingSettings(**said))
    np.testing.assert_allclose([float(rate(i)) for i in range(3)], wanted, rtol=1e-6)


# ---- what is drawn for a step --------------------------------------------------------------------


def test_flow_is_a_straight_line():
    clean, t = jnp.ones((2, 3)), jnp.array([0.0, 1.0])
    drawn = flow.noised(clean, t, jax.random.key(0))
    np.testing.assert_array_equal(drawn.mixed[0], clean[0])
    np.testing.assert_allclose(drawn.mixed[1] - drawn.velocity[1], clean[1], rtol=1e-6)
    even = flow.times(jax.random.key(1), 4000, 1.0, "uniform")
    assert abs(float(even.mean()) - 0.5) < 0.02
    assert float(flow.times(jax.random.key(1), 4000, 3.0, "uniform").mean()) > 0.6
    assert float(flow.times(jax.random.key(1), 4000, 1.0, mean=1.0, std=0.1).std()) < 0.03


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_what_the_unet_should_say_gives_the_picture_back(prediction: Any):
    betas, clean = (
        Betas(prediction_type=prediction),
        jax.random.normal(jax.random.key(0), (64, 2, 2, 3)),
    )
    drawn = noise.noised(clean, jax.random.key(1), betas)
    a, s = (x[:, None, None, None] for x in noise.signal_and_noise(drawn.times, betas))
    found = (
        (drawn.mixed - s * drawn.target) / a
        if prediction == "epsilon"
        else a * drawn.mixed - s * drawn.target
    )
    np.testing.assert_allclose(found, clean, atol=1e-3)
    ratio = np.asarray(a / s).squeeze() ** 2
    weights = noise.weights(drawn.times, 5.0, betas)
    wanted = np.minimum(ratio, 5.0) / (ratio if prediction == "epsilon" else ratio + 1)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)
    assert (noise.weights(drawn.times, None, betas) == 1).all()


def test_some_texts_are_dropped(data: str, tmp_path: Path):
    source = LatentFolder(data)
    batch = {name: jnp.stack([source[i % 4][name] for i in range(256)]) for name in source.shapes}
    task = WanTask.of(wan(tmp_path, WAN, data, condition_dropout=0.25))
    drawn = task.noised(batch, source.empty, jax.random.key(0))
    dropped = np.asarray((drawn["text"] == 0.5).all(axis=(1, 2)))
    assert 0.15 < dropped.mean() < 0.35
    np.testing.assert_array_equal(drawn["text"][~dropped], batch["text"][~dropped])


def test_a_picture_of_channels_has_every_channel_of_some_frames():
    picture = channels(
        np.random.default_rng(0).standard_normal((2, 16, 9, 6, 10)).astype(np.float32)
    )
    assert picture.shape == (2 * (4 * 6 + 4), 6 * (4 * 10 + 4))
    assert picture.dtype == np.uint8


# ---- longer --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("prediction", [None, "v_prediction"])
def test_the_unet_learns_and_resumes(prediction: str | None, tmp_path: Path):
    data, more = folder(tmp_path / "data", "sdxl"), {"snr_gamma": 5.0} if prediction else {}
    whole, halves = tmp_path / "a" / "run", tmp_path / "b" / "run"
    how = {"model": {"prediction_type": prediction}, "learning_rate": 1e-2, "export": True, **more}
    train(sdxl(whole, data, steps=30, checkpoint_every=30, **how))
    found = losses(whole, 30)
    assert np.mean(found[-5:]) < 0.9 * np.mean(found[:5]), found
    train(sdxl(halves, data, steps=10, checkpoint_every=10, **how))
    train(sdxl(halves, data, steps=30, checkpoint_every=30, **how))
    ours, theirs = arrays(tmp_path / "b", 30), arrays(tmp_path / "a", 30)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    said = json.loads((whole / "scheduler" / "scheduler_config.json").read_text())
    assert said["prediction_type"] == (prediction or "epsilon")
    assert (whole / "unet" / "diffusion_pytorch_model.safetensors").is_file()


@pytest.mark.slow
def test_every_remat_policy_gives_the_same_gradients(data: str, tmp_path: Path):
    found = {}
    for policy in POLICIES:
        task = WanTask.of(wan(tmp_path, WAN, data).replace(remat_policy=policy))
        model = state.build(task, None)
        how, (trained, fixed) = Parts(model, 0), state.split(model, 0)
        source = LatentFolder(data)
        batch = {name: jnp.stack([source[i][name] for i in range(4)]) for name in source.shapes}
        examples = task.noised(batch, jax.tree.map(jnp.asarray, source.empty), jax.random.key(0))
        found[policy] = jax.jit(Step(task, how, fixed, {}, None).gradients)(
            trained, fixed, examples
        )
    for policy, gradients in found.items():
        for one, other in zip(
            jax.tree.leaves(found["NONE"]), jax.tree.leaves(gradients), strict=True
        ):
            np.testing.assert_allclose(
                other, one, atol=1e-5 * max(1e-3, np.abs(one).max()), err_msg=policy
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wan", "sdxl"])
def test_samples_are_drawn_along_the_way(kind: str, tmp_path: Path):
    import make_latents
    from PIL import Image

    dims = ["--text-dim", "6", "--pooled-dim", "5", "--count", "4"]
    make_latents.main([str(tmp_path / "digits"), "--digits", kind, *dims])
    path, more = tmp_path / "run", {"picture_every": 2, "steps": 2}
    model = WAN | {"in_channels": 16, "out_channels": 16}
    made = (
        wan(path, model, str(tmp_path / "digits"), **more)
        if kind == "wan"
        else sdxl(path, str(tmp_path / "digits"), **more)
    )
    sampling = made.sampling.replace(num_inference_steps=2, count=2, guidance_scale=2.0)
    train(made.replace(sampling=sampling))
    assert Image.open(path / "samples" / "0000002.png").size[0] > 50
    latents = load_file(path / "samples" / "0000002.safetensors")["latents"]
    assert latents.shape == ((2, 16, 5, 4, 4) if kind == "wan" else (2, 4, 8, 8))
    assert np.isfinite(latents).all()
