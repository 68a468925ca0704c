"""A device that torch does not have here is refused by name, before a model is loaded."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from maxattn.config import ConfigErrors
from tests.examples.conftest import ROOT


def test_the_cpu_needs_no_torch() -> None:
    from sample.torch_device import device_errors

    assert not list(device_errors("--torch-device", "cpu"))


def test_a_device_that_is_not_there() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from sample.torch_device import device_errors

    there = torch.cuda.device_count()
    for device in ("gpu", f"cuda:{there}", "meta"):
        (error,) = device_errors("--torch-device", device)
        assert (error.setting, error.value) == ("--torch-device", device)
        assert re.match(r"torch computes on a device of this machine, and says: \w+", error.rule)
        assert "use cpu" in error.remedy


@pytest.mark.parametrize("script", ["decode", "embed"])
def test_commands_say_it_among_all_else(script: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    sys.path.insert(0, str(ROOT / "examples"))
    program = __import__(script)
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    save_file({"latents": np.zeros((1, 4, 2, 2, 2), np.float32)}, tmp_path / "l.safetensors")
    out = ["--out", str(tmp_path / "out")] if script == "decode" else ["--to", str(tmp_path / "e")]
    told = [str(tmp_path / "l.safetensors")] if script == "decode" else ["--prompt", "a fox"]
    found = program.arguments_of([str(tmp_path), *told, *out, "--torch-device", "gpu:9"])
    with pytest.raises(ConfigErrors) as caught:
        program.main(found)
    assert "--torch-device" in {error.setting for error in caught.value.problems}


def test_generate_says_it_before_it_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from .pipelines import draw, pipeline, sizes_of

    pipeline(tmp_path, "wan", "unipc")
    monkeypatch.chdir(tmp_path)
    where = ("--model", ".", "--out", "out", "sampling.torch_device=gpu:9")
    with pytest.raises(ConfigErrors) as caught:
        draw("wan", *sizes_of("wan"), "--prompt", "a fox", *where)
    assert "sampling.torch_device" in {error.setting for error in caught.value.problems}
    assert not (tmp_path / "out").exists()
