"""One compile for a TPU topology as a value, and its run in a child process with a time limit.

The compiler can take minutes, and a crash inside libtpu ends its process: so each compile has its
own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from maxattn.config import AttentionConfig
from maxattn.config.errors import plain
from maxattn.config.numbers import finite
from maxattn.config.plain_json import read_json
from maxattn.errors import ConfigError, Unsupported
from maxattn.tools.compile.job_json import text_of
from maxattn.tools.held_signals import held_signals
from maxattn.tools.model_shapes import Shape

# What libtpu wants where there is no TPU. Asking the metadata server would wait for minutes.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
PYTHON_VARIABLE = "MAXATTN_TPU_PYTHON"  # the python of an environment with jax[tpu] and maxattn
MOST_SECONDS = 10**6  # of one compile: eleven days
MOST_LOG = 2**16  # bytes of its log, of which the last lines are shown
Ending = Literal["compiled", "failed", "refused", "timeout", "crashed"]


@dataclass(frozen=True)
class CompileJob:
    """Say what to compile.

    Args:
        topology: libtpu's name, such as "v5p:2x2x1".
        config: its mesh covers the devices.
        shape: the global call.
        training: forward and backward; else forward alone.
        module: a whole attention module with its projections; else attention alone.
        devices: how many of the topology's to use, from the first; None for all.
        slices: how many such topologies, joined by the data centre's network.
        estimate: price the kernels by the schedule that the compiler makes.
        block: width of the feed-forward of a whole transformer block; 0 for none.
        layers: how many of what is compiled a step runs, which an estimate multiplies.
        kernel_file: PATH:FUNCTION of an attention to compile in place of maxattn's; "" for none.
    """

    topology: str
    config: AttentionConfig
    shape: Shape
    training: bool = False
    module: bool = False
    devices: int | None = None
    slices: int = 1
    estimate: bool = False
    block: int = 0
    layers: int = 1
    kernel_file: str = ""


@dataclass(frozen=True)
class Outcome:
    """Hold what came of a job.

    Args:
        ending: "compiled"; "failed" (the compiler's error); "refused" (ours); "timeout"; "crashed"
            (the child died).
        device_kind: as `Target` has it.
        plan: the text of `explain`.
        mesh: every axis with its size.
        named: the plan's collectives that the job runs, as plain values.
        found: those of the compiled program, as plain values.
        memory: bytes of one device: argument, temp, output, alias (outputs that reuse arguments),
            generated_code.
        seconds: the compiler took.
        message: what went wrong.
    """

    ending: Ending
    device_kind: str = ""
    plan: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    named: list[dict[str, Any]] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    message: str = ""
    estimate: dict[str, Any] = field(default_factory=dict)

    @property
    def needed(self) -> int:
        """Bytes that one device holds at once; outputs that reuse arguments count once."""
        have = self.memory
        return have["argument"] + have["temp"] + have["output"] - have["alias"] if have else 0


_FORMS: dict[str, Any] = {
    **dict.fromkeys(("ending", "device_kind", "plan", "message"), str),
    **dict.fromkeys(("mesh", "memory", "estimate"), dict),
    **dict.fromkeys(("named", "found"), list),
    "seconds": (int, float),
}


def read_outcome(path: Path) -> Outcome | None:
    """Read what the child wrote; None where it wrote nothing, or what is no outcome."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not found.keys() <= _FORMS.keys() or "ending" not in found:
        return None
    is_one = all(isinstance(value, _FORMS[key]) for key, value in found.items())
    return Outcome(**found) if is_one and found["ending"] in get_args(Ending) else None


def tpu_python() -> str | None:
    """Return the python that can compile for a TPU: $MAXATTN_TPU_PYTHON, else one with libtpu."""
    named = os.environ.get(PYTHON_VARIABLE)
    return named or (sys.executable if importlib.util.find_spec("libtpu") else None)


def run_in_child(job: CompileJob, seconds: float) -> Outcome:
    """Compile in a child process, which is killed with its children when the time is over.

    Args:
        job: what to compile.
        seconds: the limit.

    Raises:
        Unsupported: libtpu is not installed.
        ConfigError: the limit is no time, or the named python cannot be run.
    """
    if not finite(seconds, 0, MOST_SECONDS):
        rule = f"it is a number of seconds above 0, at most {MOST_SECONDS}"
        raise ConfigError("--time-limit", plain(seconds), rule, "write --time-limit 600")
    python = tpu_python()
    if python is None:
        rule = "the TPU's compiler comes with libtpu; no TPU is needed"
        python = f"set {PYTHON_VARIABLE} to a python that has it and maxattn"
        remedy = f'pip install "maxattn[tpu]", or {python}'
        raise Unsupported("compile", "libtpu is not installed", rule, remedy)
    text = text_of(job).encode()
    with tempfile.TemporaryDirectory(prefix="maxattn-") as folder:
        return _outcome_of_child(python, text, seconds, Path(folder))


def _outcome_of_child(python: str, text: bytes, seconds: float, folder: Path) -> Outcome:
    answer, log = folder / "outcome.json", folder / "stderr.txt"
    child = None
    with log.open("wb") as stderr:
        try:
            words = ["maxattn.tools.compile.child", str(answer)]
            with held_signals():
                child = start_child(python, *words, stdout=stderr, stderr=stderr)
            child.communicate(text, timeout=seconds)
        except subprocess.TimeoutExpired:
            return Outcome("timeout", seconds=seconds, message=f"no result after {seconds:g} s")
        finally:
            if child is not None:
                end_child(child)
    assert child is not None
    if (outcome := read_outcome(answer)) is not None:
        return outcome
    with log.open("rb") as stderr:
        stderr.seek(max(0, log.stat().st_size - MOST_LOG))
        tail = "\n".join(stderr.read().decode(errors="replace").splitlines()[-20:])
    ended = f"the compiler's process ended with status {child.returncode}"
    broken = " and an outcome that is not whole" if answer.exists() else ""
    return Outcome("crashed", message=f"{ended}{broken}\n{tail}")


def start_child(python: str, module: str, *words: str, **how: Any) -> subprocess.Popen[bytes]:
    """Start `python -m module words` with this very maxattn, in a process group of its own.

    Raises:
        ConfigError: the python cannot be run.
    """
    own = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(part for part in (own, os.environ.get("PYTHONPATH", "")) if part)
    how |= {"env": os.environ | ENVIRONMENT | {"PYTHONPATH": path}, "start_new_session": True}
    command = [python, "-m", module, *words]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, **how)  # pyright: ignore
    except OSError as error:
        rule = f"it names a python that can be run, and the system says: {error.strerror or error}"
        remedy = "name one that has libtpu and maxattn, or unset the variable"
        raise ConfigError(PYTHON_VARIABLE, plain(python), rule, remedy) from None


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and what it started, if it still runs; also after Ctrl-C."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
