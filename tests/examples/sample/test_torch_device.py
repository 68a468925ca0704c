"""A device that torch does not have here is refused by name, before a model is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from maxattn_examples.sample.torch_device import device_errors
from safetensors.numpy import save_file

from maxattn.config import ConfigErrors

from .pipelines import draw, pipeline, sizes_of


def test_the_cpu_needs_no_torch_and_a_device_that_is_not_there_is_named() -> None:
    assert not list(device_errors("--torch-device", "cpu"))
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for device in ("gpu", f"cuda:{torch.cuda.device_count()}", "meta"):
        (error,) = device_errors("--torch-device", device)
        assert (error.setting, error.value) == ("--torch-device", device)
        assert re.match(r"torch must find the device on this machine, and failed: \w+", error.rule)
        assert "use cpu" in error.remedy


COMMANDS = {
    "decode": ("l.safetensors", "--out", "out", "--torch-device", "gpu:9"),
    "embed": ("--prompt", "a fox", "--to", "e", "--torch-device", "gpu:9"),
    "generate": ("--prompt", "a fox", "--out", "out", "sampling.torch_device=gpu:9"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_the_device_beside_other_errors(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pipeline(tmp_path, "wan", "unipc")
    monkeypatch.chdir(tmp_path)
    save_file({"latents": np.zeros((1, 4, 2, 2, 2), np.float32)}, "l.safetensors")
    with pytest.raises(ConfigErrors) as caught:
        if command == "generate":
            draw("wan", "--model", ".", *sizes_of("wan"), *COMMANDS[command])
        else:
            Path("model_index.json").write_text('{"_class_name": "WanPipeline"}')
            program = __import__(command)
            program.main(program.arguments_of([".", *COMMANDS[command]]))
    setting = "sampling.torch_device" if command == "generate" else "--torch-device"
    assert setting in {error.setting for error in caught.value.problems}
    assert not Path("out").exists()
