"""Processes that answer requests: they compile in parallel, and use the device in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Remote:
    """A worker process.

    Args:
        script: a script that calls `serve`, and its arguments.
        tree: the checkout whose `maxattn` the worker imports.
    """

    def __init__(self, script: Sequence[str], tree: Path) -> None:
        path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
        env = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        words = [sys.executable, "-W", "ignore", *script]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, env=env, cwd=tempfile.gettempdir(), **pipes)

    def ask(self, *request: Any, seconds: float = 0) -> Any:
        """Call a method of the worker and return its result.

        Args:
            request: the method's name and its arguments.
            seconds: the time limit, after which the worker is ended; 0 for none. It is for kernels
                that never end.

        Raises:
            RuntimeError: the method failed, or the worker has ended.
        """
        timer = threading.Timer(seconds, self.process.kill)
        if seconds:
            timer.start()
        with suppress(BrokenPipeError):  # a worker that has ended gives no answer
            print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline() if self.process.stdout else ""
        timer.cancel()
        answer = json.loads(line) if line else {"failed": "its process has ended"}
        if isinstance(answer, dict) and "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def end(self) -> None:
        """End the worker."""
        self.process.kill()
        self.process.wait()


def serve(worker: Any) -> None:
    """Answer requests, one line of JSON each, with the methods of an object until input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints of libraries go to stderr
    for line in sys.stdin:
        what, *given = json.loads(line)
        try:
            answer = getattr(worker, what)(*given)
        except Exception as error:  # any error of a compiler or a device
            lines = str(error).strip().splitlines() or [""]
            answer = {"failed": f"{type(error).__name__}: {lines[0][:300]}"}
        print(json.dumps(answer), file=answers)


def count(asked: int, each: int = 1) -> int:
    """Return how many workers of each kind to start: `asked`, or 0 for a number by the cores."""
    return asked or max(1, (os.cpu_count() or 2) // each - 1)
