"""Schedules of TPU kernels: asked of the compiler, and kept.

The log has a line of JSON for each compiled kernel, written as soon as it is known. A line that a
kill cut off is left out, and its kernel is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

import maxattn
from maxattn.block_sizes.estimated.step_cost import Kind, StepCost
from maxattn.config.plain_json import parse_json, read_bounded
from maxattn.errors import Unsupported
from maxattn.tools.compile.process import INSTALL, CompilerProcess, CompilerStopped
from maxattn.tools.tune.kernel_job import KernelJob

START_SECONDS = 300.0

# What a kernel's program depends on beside the libraries.
_SOURCES = (
    "kernels/splash/jax_splash.py",
    "kernels/splash/tokamax.py",
    "kernels/splash/mask_codes.py",
    "kernels/splash/mask_info.py",
    "jax_private/splash.py",
    "jax_private/tokamax.py",
)
_OWN_SOURCES = (
    *(f"kernels/transposed/{name}.py" for name in (
        "forward", "tile", "backward", "backward_tile", "steps",
    )),
    "kernels/splash/mask_codes.py",
    "kernels/splash/mask_info.py",
)  # fmt: skip


class ScheduleCompiler:
    """Compile kernels in a child process; a context manager, which ends it.

    Args:
        seconds: the limit of one kernel.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._process = CompilerProcess("--offline", dumps=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of libtpu, jax and tokamax in the child."""
        why = "it has no libtpu"
        try:
            if "libtpu" in (found := self._process.ask({"versions": True}, START_SECONDS)):
                return found
        except CompilerStopped as stopped:
            why = str(stopped)
        rule = f"tiles are ranked by the schedules of libtpu, and of {self._process.python}: {why}"
        raise Unsupported("--offline", "libtpu", rule, INSTALL)

    def answer(self, job: KernelJob) -> dict[str, Any]:
        """Compile a kernel: {"cost": [...]}, or {"failed": why}, with the limit if it was over."""
        try:
            if not self._process.is_running:  # which takes longer than most kernels do
                self._process.ask({"versions": True}, START_SECONDS)
            return self._process.ask({"kernel": job.values()}, self.seconds)
        except CompilerStopped as stopped:
            kind = "timeout" if stopped.is_timeout else "crashed"
            why = str(stopped).partition("\n")[0]
            return {"failed": f"{kind}: {why}", "after": self.seconds}


class ScheduleLog:
    """Hold the answers of a file.

    Args:
        path: of the file, which need not be there.
        versions: of libtpu, jax and tokamax; answers of other versions are not taken.
    """

    def __init__(self, path: Path, versions: dict[str, str]) -> None:
        self.path = path
        self._versions = versions
        self._known = {_key(line): line for line in read_lines(path)}

    def find(self, job: KernelJob) -> dict[str, Any] | None:
        """Return what was answered of a kernel; None where it was not compiled."""
        return self._known.get(_key(self._line(job)))

    def add(self, job: KernelJob, answer: dict[str, Any]) -> None:
        """Write an answer to the file."""
        line = self._line(job) | answer
        self._known[_key(line)] = line
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell():  # a kill may have cut the last line off
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _line(self, job: KernelJob) -> dict[str, Any]:
        return {"versions": versions_text(job.kernel, self._versions), **job.values()}


def versions_text(kernel: str, versions: dict[str, str]) -> str:
    """Spell what a schedule depends on: libraries, and a digest of the sources of our own."""
    names = ("libtpu", "jax", *(("tokamax",) if kernel == "tokamax_flash" else ()))
    listed = ", ".join(f"{name} {versions.get(name, 'none')}" for name in names)
    return f"{listed}, source {source_digest(kernel)}"


@cache
def source_digest(kernel: str) -> str:
    """Return eight digits that change with the sources that make a kernel's programs."""
    sources = _OWN_SOURCES if kernel == "tpu_flash" else _SOURCES
    root = Path(maxattn.__file__).parent
    text = b"".join((root / name).read_bytes() for name in sources)
    return hashlib.sha256(text).hexdigest()[:8]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a log; none where there is no file."""
    try:
        text = read_bounded(path).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            found = parse_json(line)
        except ValueError:
            continue
        if isinstance(found, dict) and _is_whole(found):
            yield found


def costs_of(kind: Kind, answer: dict[str, Any]) -> dict[Kind, StepCost]:
    """Read what a kernel costs, and with the online softmax where that is apart; {} if it failed.

    Args:
        kind: of the kernel.
        answer: of the compiler.
    """
    named: dict[Kind, Any] = {kind: answer.get("cost"), "online": answer.get("online")}
    return {kind: StepCost.of(values) for kind, values in named.items() if values}


def jobs_of(lines: Iterable[dict[str, Any]]) -> Iterator[tuple[KernelJob, dict[str, Any]]]:
    """Pair each line's kernel with its answer."""
    fields = KernelJob.__dataclass_fields__
    for line in lines:
        yield KernelJob.of({name: line[name] for name in fields}), line


_KEYS = ("versions", *KernelJob.__dataclass_fields__)


def _is_whole(line: dict[str, Any]) -> bool:
    def is_cost(values: Any) -> bool:
        return isinstance(values, list) and len(values) == len(StepCost._fields)

    cost, online = line.get("cost"), line.get("online")
    has_cost = is_cost(cost) and (online is None or is_cost(online))
    return {*_KEYS} <= line.keys() and (has_cost or isinstance(line.get("failed"), str))


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple(v) if isinstance(v := line[key], list) else v for key in _KEYS)
