"""The TPU's compiler in a child process that answers one kernel after the other.

A kernel that takes too long costs the child, and the next one starts another: importing jax and
describing a TPU takes longer than most kernels do.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any, Self

from maxattn.errors import Unsupported
from maxattn.tools.compile.job import PYTHON_VARIABLE, end_child, start_child, tpu_python
from maxattn.tools.held_signals import held_signals
from maxattn.tools.tune.kernel_job import KernelJob

START_SECONDS = 300.0
MOST_ANSWER = 2**16  # bytes of an answer


class ScheduleCompiler:
    """Compile kernels with a time limit each; a context manager, which ends the child.

    Args:
        seconds: the limit of one.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        python = tpu_python()
        if python is None:
            raise _no_libtpu("this python", "it has no libtpu")
        self._python = python
        self._child: subprocess.Popen[bytes] | None = None
        self._answers: IO[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._versions: dict[str, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def versions(self) -> dict[str, str]:
        """The versions of libtpu, jax and tokamax in the child."""
        if self._versions is None:
            self._versions = self._start()
        return self._versions

    def answer(self, job: KernelJob) -> dict[str, Any]:
        """Compile a kernel: {"cost": [...]}, or {"failed": why}, with the limit if it was over."""
        if self._child is None:
            self._start()
        assert self._child is not None and self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, and `_read` finds out
            self._child.stdin.write(json.dumps(job.values()).encode() + b"\n")
            self._child.stdin.flush()
        return self._read(self.seconds)

    def _start(self) -> dict[str, str]:
        self._folder = tempfile.TemporaryDirectory(prefix="maxattn-")
        reading, writing = os.pipe()
        words = [str(Path(self._folder.name) / "schedules"), str(writing)]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with held_signals():
            self._child = start_child(
                self._python, "maxattn.tools.tune.schedule_child", *words,
                **silent, pass_fds=(writing,),
            )  # fmt: skip
        os.close(writing)
        self._answers = os.fdopen(reading, "rb", buffering=0)
        found = self._read(START_SECONDS)
        if "libtpu" not in found:
            raise _no_libtpu(self._python, found.get("failed", "it has no libtpu"))
        return found

    def _read(self, seconds: float) -> dict[str, Any]:
        """Return the next answer; a child that gives none is ended."""
        assert self._answers is not None
        text = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not selector.select(seconds):
                    self._stop()
                    return {"failed": f"timeout: no schedule after {seconds:g} s", "after": seconds}
                if not (part := self._answers.read(MOST_ANSWER)):
                    self._stop()
                    return {"failed": "crashed: the compiler's process ended", "after": seconds}
                text += part
        return json.loads(text)

    def _stop(self) -> None:
        if self._child is not None:
            end_child(self._child)
        if self._answers is not None:
            self._answers.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._child = self._answers = self._folder = None


def _no_libtpu(python: str, why: str) -> Unsupported:
    rule = f"tiles are ranked by the schedules of libtpu, and of {python}: {why}"
    other = f"set {PYTHON_VARIABLE} to a python that has it and maxattn"
    return Unsupported("--offline", "libtpu", rule, f'pip install "maxattn[tpu]", or {other}')
