"""What cannot be trained is said before anything is computed, all of it at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flux.task import FluxTask
from sdxl.task import SdxlTask
from train.loop import Training
from wan.task import WanTask

import maxattn as ma
from maxattn.errors import ConfigError, WeightsError
from tests.golden_text import check_golden

from .made import FLUX, I2V, WAN, flux, folder, sdxl, wan


def begin(settings: Any, mesh: Any = None) -> Training:
    kind = SdxlTask if hasattr(settings.training, "snr_gamma") else WanTask
    return Training(kind.of(settings), mesh)


def sizes_of_a_folder(path: Path) -> Any:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"num_layers": 3, "ffn_dim": 16}))
    return begin(wan(path, WAN | {"folder": str(path)}, folder(path / "data", "wan")))


def flux_of_another_pipeline(path: Path) -> Any:
    model = path.parent / "FLUX.1-Kontext-dev"
    model.mkdir()
    (model / "model_index.json").write_text('{"_class_name": "FluxKontextPipeline"}')
    given = FLUX | {"folder": str(model)}
    return FluxTask.of(flux(path, given, folder(path / "data", "flux")))


def data(path: Path, kind: str = "wan", **shapes: Any) -> str:
    return folder(path / "data", kind, **shapes)


OTHER = {"latents": (16, 2, 5, 4), "text": (3, 7)}
OTHER_SDXL = {"latents": (4, 8, 6), "pooled": (6,), "time_ids": (4,)}
MISFITS: dict[str, Callable[[Path], Any]] = {
    "flux_of_another_pipeline": flux_of_another_pipeline,
    "sizes_of_a_folder": sizes_of_a_folder,
    "undivided_batch": lambda path: begin(
        wan(path, WAN, data(path), batch_size=6, gradient_accumulation_steps=2),
        ma.AttentionConfig(ici_fsdp_parallelism=4, ici_data_parallelism=2).make_mesh(),
    ),
    "no_folder": lambda path: begin(wan(path)),
    "no_such_folder": lambda path: begin(wan(path, WAN, str(path / "nowhere"))),
    "missing_tensors": lambda path: begin(wan(path, I2V, data(path))),
    "shapes_of_another_model": lambda path: begin(wan(path, WAN, data(path, "i2v", **OTHER))),
    "sdxl_shapes": lambda path: begin(sdxl(path, data(path, "sdxl", **OTHER_SDXL))),
    "few_examples": lambda path: begin(wan(path, WAN, data(path), batch_size=8)),
    "no_model": lambda path: begin(wan(path, WAN | {"folder": str(path / "nowhere")}, data(path))),
    "no_model_sdxl": lambda path: begin(
        sdxl(path, data(path, "sdxl"), model={"folder": str(path / "nowhere")})
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_said_first(case: str, tmp_path: Path):
    with pytest.raises((ConfigError, WeightsError)) as error:
        MISFITS[case](tmp_path / "run")
    check_golden(f"training/{case}", str(error.value).replace(str(tmp_path), "."))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: wan(path, {"sizes": None}), ("sizes: null", "wan-2.1-t2v-1.3b")),
        (
            lambda path: wan(path, {"folder": "x", "num_layers": 2}),
            ("num_layers: 2", "sizes is null"),
        ),
        (
            lambda path: wan(path, gradient_accumulation_steps=3),
            ("gradient_accumulation_steps: 3", "1, 2, 4"),
        ),
        (lambda path: wan(path, lora_alpha=8.0), ("lora_alpha: 8.0", "lora_rank is 0")),
        (lambda path: wan(path, lora_rank=2, lora_targets=[]), ("lora_targets: []",)),
        (lambda path: wan(path, lora_rank=2, lora_targets=["to_x"]), ("lora_targets", "to_q")),
        (lambda path: wan(path, snr_gamma=5.0), ("snr_gamma",)),
        (lambda path: sdxl(path, timestep_shift=3.0), ("timestep_shift",)),
        (
            lambda path: sdxl(path, model={"attention_head_dim": [1, 2]}),
            ("attention_head_dim: [1, 2]", "3 resolutions"),
        ),
    ],
)
def test_settings_that_cannot_be_meant(
    make: Callable[[Path], Any], said: tuple[str, ...], tmp_path: Path
):
    with pytest.raises(ConfigError) as error:
        make(tmp_path)
    assert all(word in str(error.value) for word in said), str(error.value)


def test_where_nothing_can_be_written_nothing_is_trained(tmp_path: Path):
    (tmp_path / "file").touch()
    settings = wan(tmp_path / "file" / "run", WAN, folder(tmp_path / "data", "wan"))
    with pytest.raises(ConfigError, match=r"training\.output_dir: .*\n.*nothing can be written"):
        begin(settings).run()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("xla_gpu_no_such_thing=1", "No such compile option"),
        ("xla_gpu_autotune_level=much", "not a valid int32"),
        ("fast", "it is NAME=VALUE"),
    ],
)
def test_options_that_the_compiler_does_not_know(option: str, said: str, tmp_path: Path):
    settings = wan(
        tmp_path / "run", WAN, folder(tmp_path / "data", "wan"), compiler_options=[option]
    )
    with pytest.raises(ConfigError, match=r"training\.compiler_options") as error:
        begin(settings)
    assert said in str(error.value) and not (tmp_path / "run" / "checkpoints").exists()


def test_options_for_the_samples_along_the_way_are_asked_for_too(tmp_path: Path):
    data, wrong = (
        folder(tmp_path / "data", "wan"),
        {"compiler_options": ["xla_gpu_no_such_thing=1"]},
    )

    def settings(picture_every: int) -> Any:
        said = wan(tmp_path / "run", WAN, data, picture_every=picture_every)
        return said.model_copy(update={"sampling": said.sampling.model_copy(update=wrong)})

    begin(settings(0))
    with pytest.raises(ConfigError, match=r"sampling\.compiler_options: xla_gpu_no_such_thing=1"):
        begin(settings(2))


def test_a_real_model_needs_no_array_to_be_checked(tmp_path: Path):
    data = folder(
        tmp_path / "data", "wan", latents=(16, 21, 60, 104), text=(512, 4096), count=1, empty=False
    )
    started = begin(wan(tmp_path, {"sizes": "wan-2.1-t2v-1.3b"}, data, batch_size=1))
    assert started.task.tokens(started.shapes) == 32760
    assert {role: (plan.call.q_len, plan.call.kv_len) for role, plan in started.plans.items()} == {
        "self": (32760, 32760), "cross": (32760, 512),
    }  # fmt: skip
