"""The TPU compiler in a niced child process with a limit on processor time; results are stored."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from maxattn.config.target_names import read_target
from maxattn.tools.compile.process import tpu_python

CHILD = Path(__file__).with_name("tpu_child.py")
STORE = Path(__file__).parents[2] / "out" / "tpu_compiles.jsonl"
PYTHON = tpu_python()
SECONDS = 900  # of processor time, for one case: a busy machine changes no answer
TOPOLOGIES = {
    kind: read_target(kind).topology
    for kind in ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU v7x")
}


class Compiler:
    """Compile cases in a child process, one after another.

    Args:
        python: of an environment with jax[tpu]; default MAXATTN_TPU_PYTHON, else this one.
        store: JSON lines of results; a case in it is not compiled again.
        flags: LIBTPU_INIT_ARGS of the child.
    """

    def __init__(self, python: str | None = PYTHON, store: Path = STORE, flags: str = "") -> None:
        self.python, self.store, self.flags = python, store, flags
        self.child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def compile(self, case: dict[str, Any]) -> dict[str, Any]:
        """Compile one case of `tpu_child.lower`; return {ok, seconds, message, hbm, key}.

        After `SECONDS` of processor time the child ends; the next case starts another.
        """
        child = self.child or self._start()
        assert child.stdin and child.stdout
        child.stdin.write(json.dumps(case) + "\n")
        child.stdin.flush()
        if line := child.stdout.readline():
            return json.loads(line)
        late = child.wait() == -signal.SIGXCPU
        self.stop()
        message = f"no answer in {SECONDS} s" if late else "the compiler's process died"
        return {"ok": False, "seconds": 0.0, "message": message, "key": message}

    def stop(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None

    def _start(self) -> subprocess.Popen[str]:
        assert self.python is not None
        self.store.parent.mkdir(parents=True, exist_ok=True)
        self.child = subprocess.Popen(
            ["nice", "-n", "10", self.python, str(CHILD), str(self.store), str(SECONDS)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=CHILD.parents[2],
            env={**os.environ, "LIBTPU_INIT_ARGS": self.flags},
        )
        return self.child
