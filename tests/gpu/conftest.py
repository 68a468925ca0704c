"""Give each parallel worker another first GPU, because most tests use the first one."""

from __future__ import annotations

import os
from pathlib import Path


def _gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _turned(gpus: list[str], worker: str) -> list[str]:
    by = int(worker.removeprefix("gw")) % len(gpus)
    return gpus[by:] + gpus[:by]


if os.environ.get("PYTEST_XDIST_WORKER") and len(_gpus()) > 1:  # before jax starts its backend
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
        _turned(_gpus(), os.environ["PYTEST_XDIST_WORKER"])
    )
