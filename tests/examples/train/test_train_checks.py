"""Trainings that cannot run are refused before anything is computed, with all errors in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import maxattn as ma
from maxattn.errors import ConfigError, WeightsError
from tests.golden_text import check_golden

from .made import FLUX, I2V, WAN, begin, flux, folder, sdxl, wan


def sizes_of_a_folder(path: Path) -> Any:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"num_layers": 3, "ffn_dim": 16}))
    return wan(path, WAN | {"folder": str(path)}, data(path))


def flux_of_another_pipeline(path: Path) -> Any:
    model = path.parent / "FLUX.1-Kontext-dev"
    model.mkdir()
    (model / "model_index.json").write_text('{"_class_name": "FluxKontextPipeline"}')
    return flux(path, FLUX | {"folder": str(model)}, data(path, "flux"))


def data(path: Path, kind: str = "wan", **shapes: Any) -> str:
    return folder(path / "data", kind, **shapes)


OTHER = {"latents": (16, 2, 5, 4), "text": (3, 7)}
OTHER_SDXL = {"latents": (4, 8, 6), "pooled": (6,), "time_ids": (4,)}
OTHER_FLUX = {"latents": (4, 5, 8), "text": (3, 7), "time_ids": (6,), "pooled": None}
TWO = {"batch_size": 6, "gradient_accumulation_steps": 2}
MISFITS: dict[str, Callable[[Path], Any]] = {
    "flux_of_another_pipeline": flux_of_another_pipeline,
    "sizes_of_a_folder": sizes_of_a_folder,
    "undivided_batch": lambda path: wan(path, WAN, data(path), **TWO),
    "no_folder": wan,
    "no_such_folder": lambda path: wan(path, WAN, str(path / "nowhere")),
    "missing_tensors": lambda path: wan(path, I2V, data(path)),
    "shapes_of_another_model": lambda path: wan(path, WAN, data(path, "i2v", **OTHER)),
    "sdxl_shapes": lambda path: sdxl(path, None, data(path, "sdxl", **OTHER_SDXL)),
    "flux_shapes": lambda path: flux(path, FLUX, data(path, "flux", **OTHER_FLUX)),
    "flux_of_sdxl": lambda path: flux(
        path, FLUX, data(path, "flux", latents=(16, 4, 8), time_ids=(6,))
    ),
    "few_examples": lambda path: wan(path, WAN, data(path), batch_size=8),
    "no_model": lambda path: wan(path, WAN | {"folder": str(path / "nowhere")}, data(path)),
    "no_model_sdxl": lambda path: sdxl(path, {"folder": str(path / "nowhere")}, data(path, "sdxl")),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits_are_refused_first(case: str, tmp_path: Path) -> None:
    config = ma.AttentionConfig(ici_fsdp_parallelism=4, ici_data_parallelism=2)
    mesh = config.make_mesh() if case == "undivided_batch" else None
    with pytest.raises((ConfigError, WeightsError)) as error:
        begin(MISFITS[case](tmp_path / "run"), mesh)
    check_golden(f"training/{case}", str(error.value).replace(str(tmp_path), "."))
    assert not (tmp_path / "run" / "checkpoints").exists()


# By the setting: how settings are made, their model or training, and words of the message.
SETTINGS: list[tuple[Any, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (wan, {"sizes": None}, {}, ("sizes: null", "wan-2.1-t2v-1.3b")),
    (wan, {"folder": "x", "num_layers": 2}, {}, ("num_layers: 2", "sizes is null")),
    (wan, WAN | {"attention_head_dim": 11}, {}, ("attention_head_dim: 11", "even")),
    (wan, WAN, {"gradient_accumulation_steps": 3}, ("accumulation_steps: 3", "1, 2, 4")),
    (wan, WAN, {"boundary_ratio": 0.5}, ("boundary_ratio: 0.5", "expert is null")),
    (wan, WAN, {"lora_alpha": 8.0}, ("lora_alpha: 8.0", "lora_rank is 0")),
    (wan, WAN, {"lora_rank": 2, "lora_targets": []}, ("lora_targets: []",)),
    (wan, WAN, {"lora_rank": 2, "lora_targets": ["to_x"]}, ("lora_targets", "to_q")),
    (wan, WAN, {"snr_gamma": 5.0}, ("snr_gamma",)),
    (sdxl, {}, {"timestep_shift": 3.0}, ("timestep_shift",)),
    (sdxl, {"attention_head_dim": [1, 2]}, {}, ("attention_head_dim: [1, 2]", "3 resolutions")),
    (flux, {"sizes": None}, {}, ("sizes: null", "flux.1-dev, flux.1-schnell")),
    (flux, {"folder": "x", "num_layers": 2}, {}, ("num_layers: 2", "sizes is null")),
    (flux, {"sizes": "flux.1-dve"}, {}, ("sizes", "flux.1-dev")),
    (flux, {"layers": 2}, {}, ("layers",)),
    (flux, FLUX | {"axes_dims_rope": [2, 2, 5]}, {}, ("axes_dims_rope: [2, 2, 5]", "three even")),
    (flux, FLUX | {"attention_head_dim": 10}, {}, ("axes_dims_rope", "head dim 10")),
    (flux, FLUX | {"in_channels": 18}, {}, ("in_channels: 18", "multiple of 4")),
]


@pytest.mark.parametrize(("make", "model", "training", "words"), SETTINGS)
def test_wrong_settings_are_refused(
    make: Any, model: Any, training: Any, words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        make(tmp_path, model, **training)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = wan(tmp_path / "file" / "run", WAN, folder(tmp_path / "data", "wan"))
    with pytest.raises(ConfigError, match=r"training\.output_dir: .*\n.*nothing can be written"):
        begin(settings).run()


OPTIONS = {
    "xla_gpu_no_such_thing=1": "No such compile option",
    "xla_gpu_autotune_level=much": "not a valid int32",
    "fast": "it must be NAME=VALUE",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_the_compiler_does_not_know(option: str, tmp_path: Path) -> None:
    given = folder(tmp_path / "data", "wan")
    with pytest.raises(ConfigError, match=r"training\.compiler_options") as error:
        begin(wan(tmp_path / "run", WAN, given, compiler_options=[option]))
    assert OPTIONS[option] in str(error.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_options_of_sampling_are_checked_where_pictures_are_drawn(tmp_path: Path) -> None:
    given, wrong = folder(tmp_path / "data", "wan"), ["xla_gpu_no_such_thing=1"]

    def settings(picture_every: int) -> Any:
        found = wan(tmp_path / "run", WAN, given, picture_every=picture_every)
        return found.replace(sampling=found.sampling.replace(compiler_options=wrong))

    begin(settings(0))
    with pytest.raises(ConfigError, match=r"sampling\.compiler_options: xla_gpu_no_such_thing=1"):
        begin(settings(2))


def test_a_real_model_needs_no_array_to_be_checked(tmp_path: Path) -> None:
    shapes: Any = {"latents": (16, 21, 60, 104), "text": (512, 4096), "count": 1, "empty": False}
    given = folder(tmp_path / "data", "wan", **shapes)
    started = begin(wan(tmp_path, {"sizes": "wan-2.1-t2v-1.3b"}, given, batch_size=1))
    assert started.task.tokens(started.shapes) == 32760
    lengths = {role: (p.call.q_len, p.call.kv_len) for role, p in started.plans.items()}
    assert lengths == {"self": (32760, 32760), "cross": (32760, 512)}
