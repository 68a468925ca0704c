"""The estimate of an attention that a user's file holds: no plan says what its kernels compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maxattn.devices import Device
from maxattn.tools.compile.job import CompileJob
from maxattn.tools.compile.kernel_file import forward_flops
from maxattn.tools.estimate.program import estimate_of


def file_estimate(job: CompileJob, folder: Path, device: Device, text: str) -> dict[str, Any]:
    """Price the program of a file, as `estimate_of` does.

    Of a forward that one kernel computes, the operations are known: its rate is given too.

    Args:
        job: whose file it is.
        folder: where libtpu wrote its dumps.
        device: what the program is for.
        text: `compiled.as_text()`.
    """
    made = estimate_of(text, folder, device, {})
    kernels = made["kernels"]
    if len(kernels) == 1 and not job.training:
        kernels[0]["flops"] = forward_flops(job) / kernels[0]["calls"]
    return made
