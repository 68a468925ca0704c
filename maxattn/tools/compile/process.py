"""The TPU's compiler in a child process that answers one request after the other.

The compiler can take minutes, and a crash inside libtpu ends its process. After a timeout the
process is killed, and the next request starts another. One process serves many requests, since
importing jax and describing a TPU takes longer than compiling most kernels.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

from maxattn.config.document import parse_json
from maxattn.config.errors import plain
from maxattn.errors import ConfigError, Unsupported

log = logging.getLogger("maxattn.measuring")
# libtpu's settings without a TPU: a query of the metadata server would wait for minutes.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
PYTHON_VARIABLE = "MAXATTN_TPU_PYTHON"  # path of a python with jax[tpu] and maxattn
INSTALL = (
    f'pip install "maxattn[tpu]", or set {PYTHON_VARIABLE} to a python with libtpu and maxattn'
)
MOST_LOG = 2**16  # last bytes of the process's log that are read for errors
EVERY = 30.0  # seconds between records of a compile that goes on
PART = 2**16  # most bytes of an answer per read
HELD = signal.SIGINT, signal.SIGTERM


class CompilerStopped(Exception):
    """Raised when the compiler's process times out, or ends without an answer."""

    def __init__(self, message: str, is_timeout: bool = False) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout


class CompilerProcess:
    """A process of `compile/child.py`: the first request starts it, leaving the context ends it.

    Errors name `setting`. With `dumps`, libtpu writes its schedules into a folder that is deleted
    with the process.
    """

    def __init__(self, setting: str, dumps: bool) -> None:
        python = tpu_python()
        if python is None:
            rule = "the TPU's compiler comes with libtpu; no TPU is needed"
            raise Unsupported(setting, "libtpu is not installed", rule, INSTALL)
        self.python, self._dumps = python, dumps
        self._child: subprocess.Popen[bytes] | None = None
        self._answers: IO[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a request within `seconds`, which include starting the process.

        Raises:
            CompilerStopped: there is no answer.
        """
        until = time.monotonic() + seconds
        if self._child is None:
            self._start()
        assert self._child is not None and self._answers is not None
        # Write in a thread: a child that does not read would block a long request for ever.
        line = json.dumps(request).encode() + b"\n"
        threading.Thread(target=_write, args=(self._child.stdin, line), daemon=True).start()
        text = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                left = until - time.monotonic()
                if not selector.select(max(0.0, min(left, EVERY))):
                    if left > EVERY:
                        took = seconds - left + EVERY
                        log.info("compiling for %.0f s, at most %.0f (--time-limit)", took, seconds)
                        continue
                    self.stop()
                    raise CompilerStopped(f"no result after {seconds:g} s", is_timeout=True)
                if not (part := self._answers.read(PART)):
                    raise self.crash(bool(text))
                text += part
        try:
            found = parse_json(text.decode())
        except ValueError:
            raise self.crash(True) from None
        return found if isinstance(found, dict) else {}

    def crash(self, is_broken: bool) -> CompilerStopped:
        """End the process, and return the error with the end of its log."""
        assert self._child is not None and self._folder is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(1)
        status, path = self._child.poll(), Path(self._folder.name, "log")
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - MOST_LOG))
            tail = "\n".join(log.read().decode(errors="replace").splitlines()[-20:])
        self.stop()
        broken = " and an incomplete outcome" if is_broken else ""
        ended = f"the compiler's process ended with status {status}{broken}"
        return CompilerStopped(f"{ended}\n{tail}".rstrip())

    def stop(self) -> None:
        """Kill the process, if it is running, and its children."""
        if (child := self._child) is not None:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.close()
        if self._answers is not None:
            self._answers.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._child = self._answers = self._folder = None

    def _start(self) -> None:
        """Start the process with this copy of maxattn, in a new process group."""
        self._folder = tempfile.TemporaryDirectory(prefix="maxattn-")
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "rb", buffering=0)
        own = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(part for part in (own, os.environ.get("PYTHONPATH", "")) if part)
        schedules = str(Path(self._folder.name, "schedules")) if self._dumps else ""
        words = "-m", "maxattn.tools.compile.child", schedules, str(writing)
        try:
            with Path(self._folder.name, "log").open("wb") as log, held_signals():
                self._child = subprocess.Popen(
                    [self.python, *words],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
                    pass_fds=(writing,),
                    start_new_session=True,
                )
        except OSError as error:
            why = error.strerror or error
            rule = f"it must name a python that can be run, and the system reports: {why}"
            remedy = "name one that has libtpu and maxattn, or unset the variable"
            raise ConfigError(PYTHON_VARIABLE, plain(self.python), rule, remedy) from None
        finally:
            os.close(writing)


def _write(stdin: IO[bytes], line: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ValueError):  # the next read reports it
        stdin.write(line)
        stdin.flush()


def tpu_python() -> str | None:
    """Return a python that can compile for a TPU: $MAXATTN_TPU_PYTHON, else one with libtpu."""
    named = os.environ.get(PYTHON_VARIABLE)
    return named or (sys.executable if importlib.util.find_spec("libtpu") else None)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Delay Ctrl-C and TERM until the block ends, so that no new child is left running."""
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in HELD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
