"""Scalars for TensorBoard, from process 0."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from maxattn.errors import ConfigError
from maxattn_examples.common import hosts


class Board(AbstractContextManager["Board"]):
    """Write scalars that TensorBoard draws.

    Args:
        folder: where to; None, and every process but the first, writes nothing.
        first: steps taken before this run: what a killed run wrote of later ones is not shown.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path | None, first: int) -> None:
        self._writer: Any = None
        if folder is None:
            return
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            rule = "it needs the package tensorboardX"
            remedy = "pip install tensorboardX, or training.tensorboard=false"
            raise ConfigError("training.tensorboard", "true", rule, remedy) from None
        if hosts.is_first():
            self._writer = SummaryWriter(str(folder), purge_step=first + 1, flush_secs=10)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, step: int, **scalars: float | None) -> None:
        """Write scalars of a step; those that are None are not known."""
        if self._writer is None:
            return
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(f"training/{name}", value, step)
