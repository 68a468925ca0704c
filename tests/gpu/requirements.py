"""Requirements of GPU tests, which are skipped with the reason if one is missing."""

from __future__ import annotations

import jax
import pytest

import maxattn as ma
from maxattn.kernels import refusal

PACKAGE = {
    "flash": "fa4-jax",
    "cudnn_flash_te": "transformer-engine-jax",
    "tokamax_flash": "tokamax",
}


def skip_unless_available(kernel: str, devices: int = 1) -> None:
    """Skip the test without an NVIDIA GPU, with too few, or without the kernel's package."""
    target = ma.Target.here()
    if target.platform != "gpu":
        pytest.skip(f"needs an NVIDIA GPU, and this is {target.device_kind}")
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} GPUs, and this machine has {len(jax.devices())}")
    package = PACKAGE.get(kernel)
    if package and target.version(package) is None:
        pytest.skip(f"{package} is not installed")


def skip_unless_taken(kernel: str, call: ma.Call) -> None:
    """Skip the test where the kernel does not run, or refuses the call."""
    skip_unless_available(kernel)
    if reason := refusal(kernel, call, ma.Target.here()):
        pytest.skip(str(reason))
