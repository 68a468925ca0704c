"""One compile for a TPU topology as a value, and its run in a child process with a time limit."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from maxattn import masks
from maxattn.config import AttentionConfig
from maxattn.config.errors import plain
from maxattn.config.numbers import finite
from maxattn.errors import ConfigError, Unsupported
from maxattn.masks import Mask
from maxattn.tools.compile.process import CompilerProcess, CompilerStopped
from maxattn.tools.model_shapes import Shape

MOST_SECONDS = 10**6  # most seconds of one compile: eleven days


@dataclass(frozen=True)
class CompileJob:
    """The program to compile, and for which TPUs."""

    topology: str  # libtpu's name, such as "v5p:2x2x1"; the config's mesh covers its devices
    config: AttentionConfig
    shape: Shape
    training: bool = False  # forward and backward; else forward alone
    module: bool = False  # a whole attention module with its projections; else attention alone
    # how many of the topology's devices to use, from the first; None for all
    devices: int | None = None
    slices: int = 1  # how many such topologies are joined by the data centre's network
    estimate: bool = False  # price the kernels by the schedule that the compiler makes
    block: int = 0  # width of the feed-forward of a whole transformer block; 0 for none
    layers: int = 1  # number of layers of the model; the estimate of a step is multiplied by it
    # PATH:FUNCTION of an attention to compile in place of maxattn's; "" for none
    kernel_file: str = ""
    flat: bool = False  # whether that function takes and returns arrays [B, T, N*H]
    # tiles that it visits for one head, without and with a test of the mask; () to count them from
    # the shape's mask
    visited: tuple[int, ...] = ()


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Outcome:
    """The result of a job; the types of its fields are checked."""

    # "compiled"; "failed" (in the compiler); "refused" (by maxattn); "timeout"; "crashed" (the
    # child died)
    ending: Literal["compiled", "failed", "refused", "timeout", "crashed"]
    device_kind: str = ""
    plan: str = ""  # the text of `explain`
    mesh: dict[str, int] = field(default_factory=dict)
    # named, found: the collectives in the plan, and in the compiled program
    named: list[dict[str, Any]] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)
    # bytes of one device: argument, temp, output, alias (outputs that reuse arguments),
    # generated_code
    memory: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    message: str = ""  # the error, if any
    # the time by schedules (estimate/program.py), or why it is refused; {} for none
    estimate: dict[str, Any] = field(default_factory=dict)

    @property
    def needed(self) -> int:
        """Bytes that one device needs at once; outputs that reuse arguments count once."""
        have = self.memory
        return have["argument"] + have["temp"] + have["output"] - have["alias"] if have else 0


def run_in_child(job: CompileJob, seconds: float) -> Outcome:
    """Compile in a child process, which is killed with its children after `seconds`."""
    if not finite(seconds, 0, MOST_SECONDS):
        rule = f"it must be a number of seconds above 0, at most {MOST_SECONDS}"
        raise ConfigError("--time-limit", plain(seconds), rule, "write --time-limit 600")
    with CompilerProcess("compile", job.estimate and not job.block) as process:
        try:
            answer = process.ask({"compile": values_of(job)}, seconds)
            try:
                return Outcome(**answer)
            except (ValidationError, TypeError):
                raise process.crash(True) from None
        except CompilerStopped as stopped:
            took = seconds if stopped.is_timeout else 0.0
            ending = "timeout" if stopped.is_timeout else "crashed"
            return Outcome(ending, seconds=took, message=str(stopped))


# ---- a job as JSON -------------------------------------------------------------------------------


def values_of(job: CompileJob) -> dict[str, Any]:
    """Return a job as JSON values; refuse masks with arrays, and masks that users defined."""
    values = job.config.resolved()
    config = {key: values[key] for key in job.config.model_fields_set}
    shape = _fields(job.shape) | {"mask": _written(job.shape.mask)}
    return _fields(job) | {"config": config, "shape": shape}


def job_of(values: dict[str, Any]) -> CompileJob:
    """Make the job from the result of `values_of`."""
    shape = Shape(**values["shape"] | {"mask": _read(values["shape"]["mask"])})
    read: dict[str, Any] = {"config": AttentionConfig(**values["config"]), "shape": shape}
    read["visited"] = tuple(values["visited"])
    return CompileJob(**values | read)


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _written(value: Any) -> Any:
    """Return a mask's class name and fields as JSON values; a field may be a mask too."""
    if isinstance(value, tuple):
        return [_written(part) for part in value]
    if value is None or isinstance(value, int):
        return value
    kind = type(value).__name__
    if not isinstance(value, Mask) or getattr(masks, kind, None) is not type(value):
        rule = "a mask is sent to the compiler's process by its name and numbers"
        remedy = "compile with a mask of maxattn.masks that has no arrays"
        raise Unsupported("compile", f"mask with {kind}", rule, remedy)
    return {"kind": kind, **{name: _written(part) for name, part in _fields(value).items()}}


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        kind = getattr(masks, value["kind"])
        return kind(**{key: _read(part) for key, part in value.items() if key != "kind"})
    return tuple(map(_read, value)) if isinstance(value, list) else value
