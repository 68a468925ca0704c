"""A `CompileJob` as JSON, for the child process that compiles it."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from maxattn import masks
from maxattn.config import AttentionConfig
from maxattn.config.plain_json import parse_json
from maxattn.errors import Unsupported
from maxattn.masks import Mask
from maxattn.tools.model_shapes import Shape

if TYPE_CHECKING:
    from maxattn.tools.compile.job import CompileJob

KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(masks.Full, masks.Empty, masks.Causal, masks.LocalWindow, masks.BlockCausal),
        *(masks.BlockSlidingWindow, masks.VideoMask, masks.KeyLimit, masks.And, masks.Or),
        *(masks.Not, masks.SegmentLengths, masks.Rectangle, masks.TeacherForcing),
    )
}


def text_of(job: CompileJob) -> str:
    """Write a job.

    Raises:
        Unsupported: its mask holds arrays, or is a class of the user's, which a child cannot know.
    """
    values = job.config.resolved()
    config = {key: values[key] for key in job.config.model_fields_set}
    shape = _fields(job.shape) | {"mask": _written(job.shape.mask)}
    return json.dumps(_fields(job) | {"config": config, "shape": shape})


def job_values(text: str) -> dict[str, Any]:
    """Read the fields of a job that `text_of` wrote."""
    found = parse_json(text)
    shape = Shape(**found["shape"] | {"mask": _read(found["shape"]["mask"])})
    return found | {"config": AttentionConfig(**found["config"]), "shape": shape}


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _written(value: Any) -> Any:
    """Return a mask as its kind and its fields, those that are masks likewise."""
    if not isinstance(value, Mask):
        return [_written(part) for part in value] if isinstance(value, tuple) else value
    kind = type(value).__name__
    if KINDS.get(kind) is not type(value):
        rule = f"a mask goes to the compiler's process by name, as one of {', '.join(KINDS)}"
        raise Unsupported("compile", f"mask {kind}", rule, "compile with a mask of these")
    return {"kind": kind, **{name: _written(part) for name, part in _fields(value).items()}}


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        return KINDS[value["kind"]](**{k: _read(v) for k, v in value.items() if k != "kind"})
    return tuple(map(_read, value)) if isinstance(value, list) else value
