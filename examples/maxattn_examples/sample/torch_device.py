"""Refuses a device that torch does not have here, before a model is loaded."""

# torch is optional: types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from maxattn.errors import ConfigError


def device_errors(option: str, device: str) -> Iterator[ConfigError]:
    """Yield why torch cannot compute on a device; nothing where torch is not installed.

    Args:
        option: the command's, or the setting.
        device: as torch names it.
    """
    if device == "cpu" or find_spec("torch") is None:
        return
    import torch

    try:
        torch.zeros(1, device=device).tolist()
    except (AssertionError, RuntimeError) as error:  # torch's own, of devices that are not there
        said = str(error).strip().partition("\n")[0].rstrip(".")
        rule = f"torch must find the device on this machine, and failed: {said}"
        remedy = "use cpu, or cuda beside an NVIDIA GPU and a torch that was built for CUDA"
        yield ConfigError(option, device, rule, remedy)
