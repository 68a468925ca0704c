"""Compile TPU kernels, log the costs of their schedules, and search for the fastest tiles.

The log gets a line of JSON as soon as a kernel is compiled. So a stopped search can continue, and
shapes with the same tiles share compiled kernels. An incomplete line, left by a kill, is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import maxattn
from maxattn.block_sizes import adjust, facts_of
from maxattn.block_sizes.estimated.choose import divides, known_tiles, padded_pairs, price, tiles_of
from maxattn.block_sizes.estimated.grids import evaluates
from maxattn.block_sizes.estimated.step_cost import Costs, Evaluates, Kind, Seconds, StepCost, Tile
from maxattn.block_sizes.few_keys import FEW_KEYS
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.config.document import parse_json, read_bounded
from maxattn.errors import Unsupported
from maxattn.target import Target
from maxattn.tools.compile.process import INSTALL, CompilerProcess, CompilerStopped
from maxattn.tools.tune.candidates import tile_choices, without_likes
from maxattn.tools.tune.kernel_job import KernelJob

START_SECONDS = 300.0

# Sources that the program of a library's kernel depends on, then those of tpu_flash's program.
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
_FEW_KEYS_SOURCES = "kernels/transposed/few_keys.py", "kernels/transposed/tile.py"


class ScheduleCompiler(CompilerProcess):
    """Compile kernels, each within `seconds`, in a child process that ends with the context."""

    def __init__(self, seconds: float) -> None:
        super().__init__("--offline", dumps=True)
        self.seconds = seconds

    @cached_property
    def versions(self) -> dict[str, str]:
        why = "it has no libtpu"
        try:
            if "libtpu" in (found := self.ask({"versions": True}, START_SECONDS)):
                return found
        except CompilerStopped as stopped:
            why = str(stopped)
        rule = f"libtpu's schedules rank the tiles, and {self.python} makes none: {why}"
        raise Unsupported("--offline", "libtpu", rule, INSTALL)

    def answer(self, job: KernelJob) -> dict[str, Any]:
        """Return the compiler's answer; if it stops, {"failed": why, "after": the time limit}."""
        try:
            if self._child is None:  # START_SECONDS are for the start alone
                self.ask({"versions": True}, START_SECONDS)
            return self.ask({"kernel": job.values()}, self.seconds)
        except CompilerStopped as stopped:
            kind = "timeout" if stopped.is_timeout else "crashed"
            why = str(stopped).partition("\n")[0]
            return {"failed": f"{kind}: {why}", "after": self.seconds}


class ScheduleLog:
    """A log file of answers; `find` ignores answers of other versions of libtpu, jax or maxattn."""

    def __init__(self, path: Path, versions: dict[str, str]) -> None:
        self.path = path
        self._versions = versions
        self._known = {_key(line): line for line in read_lines(path)}

    def find(self, job: KernelJob) -> dict[str, Any] | None:
        """Return the logged answer for a kernel; None if it was not compiled."""
        return self._known.get(_key(self._line(job)))

    def add(self, job: KernelJob, answer: dict[str, Any]) -> None:
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
    """Write the versions that a schedule depends on: libraries, a digest of maxattn's sources."""
    names = ("libtpu", "jax", *(("tokamax",) if kernel == "tokamax_flash" else ()))
    listed = ", ".join(f"{name} {versions.get(name, 'none')}" for name in names)
    return f"{listed}, source {source_digest(kernel)}"


@cache
def source_digest(kernel: str) -> str:
    """Return eight hex digits that change if the sources of a kernel's programs change."""
    sources = {"tpu_flash": _OWN_SOURCES, FEW_KEYS: _FEW_KEYS_SOURCES}.get(kernel, _SOURCES)
    root = Path(maxattn.__file__).parent
    text = b"".join((root / name).read_bytes() for name in sources)
    return hashlib.sha256(text).hexdigest()[:8]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a log; nothing if the file does not exist."""
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
    """Return an answer's cost, and that of the online softmax as "online"; {} after a failure."""
    named: dict[Kind, Any] = {kind: answer.get("cost"), "online": answer.get("online")}
    return {kind: StepCost.of(values) for kind, values in named.items() if values}


def jobs_of(lines: Iterable[dict[str, Any]]) -> Iterator[tuple[KernelJob, dict[str, Any]]]:
    """Yield the kernel and the answer of each line of a log."""
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


# ---- the search ----------------------------------------------------------------------------------

FORWARDS = 2  # a backward tile must divide one of this many fastest forward tiles
PATIENCE = 4  # a search ends after so many slower tiles in sequence
PRODUCTS: dict[Kind, int] = {"fwd": 2, "dkv": 4, "fused": 5, "dq": 3}  # matmuls of a tile
Say = Callable[[KernelJob, dict[str, Any], bool], None]


@dataclass
class OfflineSearch:
    """Search the tiles of one call: compile kernels, and keep their costs and failures.

    `limit` is the most tiles to try for each kernel, besides the default tiles. `say` is called
    with each kernel, its answer, and whether the answer was in the log.
    """

    compiler: ScheduleCompiler
    log: ScheduleLog
    kernel: KernelKind
    call: Call
    target: Target
    limit: int
    say: Say
    costs: dict[tuple[Kind, Evaluates], dict[Tile, StepCost]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def run(self, training: bool) -> Costs:
        """Search the tiles of the forward, in training also of the backward; return the costs."""
        for each in (False, True) if training else (False,):  # the default tiles
            sizes, _ = adjust(FlashBlockSizes(), self.call, self.kernel, self.target, each)
            for kind, tile in tiles_of(sizes).items():
                self._cost(kind, tile)
        kinds: tuple[Kind, ...] = ("fwd",)
        if training:
            kinds = ("fwd", "dkv", "dq", "fused") if self.kernel == "flash" else ("fwd", "fused")
        for kind in kinds:
            self._search(kind, training)
        return self.costs

    def _search(self, kind: Kind, training: bool) -> None:
        facts = facts_of(self.call, self.kernel, self.target, training)
        every = tile_choices(kind, self.call, facts)
        if kind != "fwd" and self.kernel != "tpu_flash":
            # A backward tile must divide one of the fastest forward tiles.
            fastest = self._fastest_forwards
            every = [tile for tile in every if any(divides(kind, tile, one) for one in fastest)]
        core = self.target.device.core
        assert core is not None, self.target.device_kind
        best, vain = float("inf"), 0
        choices = without_likes(every, self.call)
        for tile, _ in zip(choices, range(self.limit), strict=False):
            if vain >= PATIENCE:
                return
            # Skip a tile whose padded matmuls alone, at the peak rate, take longer than the best.
            pairs = padded_pairs(tile, self.call) * self.call.heads * self.call.batch
            if 2 * PRODUCTS[kind] * pairs * self.call.head_dim / core.peak < best:
                found = self._cost(kind, tile)
                slow = found.slow if found else float("inf")
                best, vain = min(best, slow), 0 if slow < best else vain + 1

    @cached_property
    def _fastest_forwards(self) -> list[Tile]:
        priced = {t: self._price("fwd", t) for t in known_tiles(self.costs, "fwd")}
        times = {tile: one.slow for tile, one in priced.items() if one}
        return sorted(times, key=lambda tile: times[tile])[:FORWARDS]

    def _cost(self, kind: Kind, tile: Tile) -> Seconds | None:
        """Look up or compile a kernel; return the call's time, or None if the compile failed."""
        masked = evaluates(self.call, tile)
        what = self.target.device_kind, self.kernel, kind, tile
        job = KernelJob(*what, self.call.head_dim, self.call.dtype, masked)
        answer = self.log.find(job)
        if answer and answer.get("after", float("inf")) < self.compiler.seconds:
            answer = None  # it timed out before, with a lower limit
        is_known = answer is not None
        if answer is None:
            answer = self.compiler.answer(job)
            self.log.add(job, answer)
        self.say(job, answer, is_known)
        for each, cost in costs_of(kind, answer).items():
            self.costs.setdefault((each, masked), {})[tile] = cost
        if "failed" in answer:
            self.failures.append(answer["failed"])
        return self._price(kind, tile)

    def _price(self, kind: Kind, tile: Tile) -> Seconds | None:
        return price(self.costs, kind, tile, self.call, self.target, self.kernel)
