"""Which models a command is about: those of the folder that it is given."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn_examples.common.command import SettingsClass
from maxattn_examples.common.pipeline_folder import PIPELINES, Family, index_of, read_mapping
from maxattn_examples.sample.command import settings_of
from maxattn_examples.sample.task import SamplingTask

MODELS: dict[str, Family] = {
    "WanTransformer3DModel": "wan",
    "FluxTransformer2DModel": "flux",
    "UNet2DConditionModel": "sdxl",
}
MakeTask = Callable[[Any, Path], SamplingTask]  # of settings and the folder of the weights
ReadSettings = Callable[[argparse.Namespace, Sequence[str]], Any]


def family_of(found: argparse.Namespace) -> Family:
    """Return the family of the model in the folder that the arguments name.

    Raises:
        ConfigErrors: no folder is named, or it does not say of which family it is.
    """
    if found.model is None:
        rule, remedy = "weights are in a folder in diffusers' format", "give --model FOLDER"
        raise ConfigErrors([ConfigError("--model", "(none)", rule, remedy)])
    folder = Path(found.model)
    kind = index_of(folder).get("_class_name")
    by_pipeline: list[Family] = [name for name, kinds in PIPELINES.items() if kind in kinds]
    if by_pipeline:
        return by_pipeline[0]
    for part in (".", "transformer", "unet"):
        file = folder / part / "config.json"
        if file.is_file() and (name := MODELS.get(read_mapping(file).get("_class_name", ""))):
            return name
    rule = "model_index.json or config.json says which model it is: Wan, SDXL or Flux.1"
    remedy = "give a folder in diffusers' format"
    raise ConfigErrors([ConfigError("--model", folder, rule, remedy)])


def task_of_family(family: Family) -> tuple[MakeTask, ReadSettings]:
    """Return what makes a family's sampling task, and what reads its settings with overrides."""
    make: MakeTask
    settings_class: SettingsClass
    if family == "wan":
        from maxattn_examples.digits_large.sampling_task import ClipSamplingTask
        from maxattn_examples.digits_large.settings import Settings as ClipSettings
        from maxattn_examples.digits_large.settings import describes_clips
        from maxattn_examples.wan.sampling import WanSamplingTask
        from maxattn_examples.wan.settings import Settings as WanSettings

        def class_of(path: str, overrides: Sequence[str]) -> type[WanSettings]:
            return ClipSettings if describes_clips(path, overrides) else WanSettings

        def make_wan(settings: Any, folder: Path) -> SamplingTask:
            kind = ClipSamplingTask if isinstance(settings, ClipSettings) else WanSamplingTask
            return kind.of(settings, folder)

        make, settings_class = make_wan, class_of
    elif family == "flux":
        from maxattn_examples.flux.sampling import FluxSamplingTask
        from maxattn_examples.flux.settings import Settings as FluxSettings

        make, settings_class = FluxSamplingTask.of, FluxSettings
    else:
        from maxattn_examples.sdxl.sampling import SdxlSamplingTask
        from maxattn_examples.sdxl.settings import Settings as SdxlSettings

        make, settings_class = SdxlSamplingTask.of, SdxlSettings

    def read(found: argparse.Namespace, more: Sequence[str]) -> Any:
        return settings_of(found, settings_class, more)

    return make, read
