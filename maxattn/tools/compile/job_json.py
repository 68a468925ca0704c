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
    plain = {f.name: getattr(job, f.name) for f in fields(job)}
    shape = {f.name: getattr(job.shape, f.name) for f in fields(job.shape)}
    shape["mask"] = _mask_values(job.shape.mask)
    values = job.config.resolved()
    config = {key: values[key] for key in job.config.model_fields_set}
    return json.dumps(plain | {"config": config, "shape": shape})


def job_values(text: str) -> dict[str, Any]:
    """Read the fields of a job that `text_of` wrote."""
    found = parse_json(text)
    shape = found["shape"]
    shape = Shape(**shape | {"mask": _mask_of(shape["mask"])})
    return found | {"config": AttentionConfig(**found["config"]), "shape": shape}


def _mask_values(mask: Mask) -> dict[str, Any]:
    """Return the kind of a mask and its fields, those that are masks likewise."""
    kind = type(mask).__name__
    if KINDS.get(kind) is not type(mask):
        rule = f"a mask goes to the compiler's process by name, as one of {', '.join(KINDS)}"
        raise Unsupported("compile", f"mask {kind}", rule, "compile with a mask of these")
    values = ((f.name, getattr(mask, f.name)) for f in fields(mask))  # pyright: ignore[reportArgumentType]
    return {"kind": kind, **{name: _value(value) for name, value in values}}


def _value(value: Any) -> Any:
    if isinstance(value, Mask):
        return _mask_values(value)
    return [_value(part) for part in value] if isinstance(value, tuple) else value


def _mask_of(values: dict[str, Any]) -> Mask:
    given = {name: _read(value) for name, value in values.items() if name != "kind"}
    return KINDS[values["kind"]](**given)


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        return _mask_of(value)
    return tuple(map(_read, value)) if isinstance(value, list) else value
