"""Flux.1, tiny, trained by the command: what is learned, resumed, adapted, spread and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flux.task import FluxTask
from safetensors.numpy import load_file
from train.latents import LatentFolder
from train.loop import Training

from maxattn.errors import ConfigError
from tests.golden_text import check_golden

from .made import FLUX, flux, folder
from .runs import arrays

STEPS = 12


def losses(path: Path, step: int) -> list[float]:
    facts = path / "checkpoints" / str(step) / "facts" / "metadata"
    return json.loads(facts.read_text())["losses"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four examples: with a batch of four, every batch is all of them."""
    return folder(tmp_path_factory.mktemp("data") / "flux", "flux")


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a stop; tests may read it, not change it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    settings = flux(path, FLUX, data, steps=STEPS, checkpoint_every=STEPS, export=True)
    Training(FluxTask.of(settings)).run()
    return path


def test_the_loss_goes_down(whole: Path) -> None:
    found = losses(whole, STEPS)
    assert np.mean(found[-4:]) < 0.9 * np.mean(found[:4]), found


def test_what_is_exported_is_a_folder_of_diffusers(whole: Path, data: str) -> None:
    again = flux(whole, {"folder": str(whole), "dtype": "float32"}, data)
    assert FluxTask.of(again).sizes == FluxTask.of(flux(whole, FLUX, data)).sizes
    exported = load_file(whole / "transformer" / "diffusion_pytorch_model.safetensors")
    average = arrays(whole.parent, STEPS)
    name = "['average']['single_transformer_blocks']['proj_mlp']['kernel']"
    np.testing.assert_array_equal(
        exported["single_transformer_blocks.1.proj_mlp.weight"], average[name][1].T
    )
    said = json.loads((whole / "scheduler" / "scheduler_config.json").read_text())
    assert said["_class_name"] == "FlowMatchEulerDiscreteScheduler" and said["use_dynamic_shifting"]


@pytest.mark.slow
def test_pictures_along_the_way_are_drawn_by_their_tokens(data: str, tmp_path: Path) -> None:
    settings = flux(tmp_path / "run", FLUX, data, steps=2, picture_every=2)
    sampling = settings.sampling.replace(num_inference_steps=2, count=2, true_cfg_scale=2.0)
    Training(FluxTask.of(settings.replace(sampling=sampling))).run()
    latents = load_file(tmp_path / "run" / "samples" / "0000002.safetensors")["latents"]
    assert latents.shape == (2, 4, 4, 8) and np.isfinite(latents).all()


def test_guidance_and_times_are_what_the_model_is_told(data: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def model(x: Any, t: Any, text: Any, pooled: Any, guidance: Any) -> Any:
        seen.update(t=t, guidance=guidance, text=text)
        return jnp.zeros_like(x)

    source = LatentFolder(data)
    batch = {name: jnp.stack([source[i][name] for i in range(4)]) for name in source.shapes}
    for sizes, told in ((FLUX, [1.5] * 4), (FLUX | {"sizes": "flux.1-schnell"}, None)):
        said = {"embedded_guidance": 1.5, "condition_dropout": 0.5}
        task = FluxTask.of(flux(tmp_path, sizes, data, **said))
        examples = task.noised(batch, source.empty, jax.random.key(1))
        loss: Any = task.loss
        found = float(loss(model, examples))
        assert found == pytest.approx(float(jnp.mean(examples["velocity"] ** 2)), rel=1e-6)
        np.testing.assert_allclose(seen["t"], 1000 * examples["times"], rtol=1e-6)
        assert (seen["guidance"] is None) if told is None else (seen["guidance"] == 1.5).all()
        dropped = np.asarray((examples["text"] == 0.5).all(axis=(1, 2)))
        assert 0 < dropped.sum() < 4
        np.testing.assert_array_equal((examples["pooled"] == 0.5).all(axis=1), dropped)


WRONG: dict[str, Any] = {
    "flux_shapes": {"latents": (4, 5, 8), "text": (3, 7), "time_ids": (6,), "pooled": None},
    "flux_of_sdxl": {"latents": (16, 4, 8), "time_ids": (6,)},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_said_first(case: str, tmp_path: Path) -> None:
    made = folder(tmp_path / "data", "flux", **WRONG[case])
    with pytest.raises(ConfigError) as error:
        Training(FluxTask.of(flux(tmp_path / "run", FLUX, made)))
    check_golden(f"training/{case}", str(error.value).replace(str(tmp_path), "."))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"sizes": None}, ("sizes: null", "flux.1-dev, flux.1-schnell")),
        ({"folder": "x", "num_layers": 2}, ("num_layers: 2", "sizes is null")),
        ({"sizes": "flux.1-dve"}, ("sizes", "flux.1-dev")),
        ({"layers": 2}, ("layers",)),
        (FLUX | {"axes_dims_rope": [2, 2, 5]}, ("axes_dims_rope: [2, 2, 5]", "three even")),
        (FLUX | {"axes_dims_rope": [4, 4]}, ("axes_dims_rope: [4, 4]", "head dim 8")),
        (FLUX | {"attention_head_dim": 10}, ("axes_dims_rope", "head dim 10")),
        (FLUX | {"in_channels": 18}, ("in_channels: 18", "multiple of 4")),
    ],
)
def test_settings_that_cannot_be_meant(model: Any, said: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        flux(tmp_path, model)
    assert all(word in str(error.value) for word in said), str(error.value)


def test_sizes_that_are_not_the_folder_s_are_refused(whole: Path, data: str) -> None:
    named = FLUX | {"folder": str(whole), "num_layers": 1}
    with pytest.raises(ConfigError, match=r"model\.num_layers: 1\n.*has 2"):
        FluxTask.of(flux(whole, named, data))
