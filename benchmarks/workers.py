"""Processes that answer requests: they compile at once, and use the device one after the other."""

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
    """Start a worker, and ask it.

    Args:
        script: that calls `serve`, with its arguments.
        tree: the checkout whose `maxattn` it imports.
    """

    def __init__(self, script: Sequence[str], tree: Path) -> None:
        path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
        env = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        words = [sys.executable, "-W", "ignore", *script]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, env=env, cwd=tempfile.gettempdir(), **pipes)

    def ask(self, *request: Any, seconds: float = 0) -> Any:
        """Call a method of the worker and return what it returns.

        Args:
            request: the method's name and its arguments.
            seconds: after which the worker is ended, such as one whose kernel never ends; 0 for
                never.

        Raises:
            RuntimeError: the method failed, or the worker has ended.
        """
        timer = threading.Timer(seconds, self.process.kill)
        if seconds:
            timer.start()
        with suppress(BrokenPipeError):  # then there is no answer
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
    """Answer requests with the methods of an object, a line of JSON each, until there are none."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        what, *given = json.loads(line)
        try:
            answer = getattr(worker, what)(*given)
        except Exception as error:  # any, of a compiler or a device
            lines = str(error).strip().splitlines() or [""]
            answer = {"failed": f"{type(error).__name__}: {lines[0][:300]}"}
        print(json.dumps(answer), file=answers)


def count(asked: int, each: int = 1) -> int:
    """Return how many workers of each kind to start: those asked for, else by the cores."""
    return asked or max(1, (os.cpu_count() or 2) // each - 1)
