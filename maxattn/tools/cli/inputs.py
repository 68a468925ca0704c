"""What a command computes: CONFIG with its overrides, and the shapes of --shape and the file.

What is written wrongly is refused by an error of maxattn that names the option, here and in all
readers of options.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

from maxattn.config import AttentionConfig
from maxattn.config.document import read
from maxattn.config.errors import plain
from maxattn.config.numbers import LARGEST, whole
from maxattn.config.overrides import apply_overrides
from maxattn.errors import InputError
from maxattn.tools import model_shapes
from maxattn.tools.cli.masks import check_fits, read_mask
from maxattn.tools.model_shapes import Shape


@dataclass(frozen=True)
class Source:
    """Hold what a user gave as CONFIG and key=value.

    Args:
        config: the settings of attention.
        sections: the file's values with its program's sections, overrides applied.
        path: the file, or empty for overrides alone.
        notes: what was read otherwise than it was written.
    """

    config: AttentionConfig
    sections: dict[str, Any]
    path: str
    notes: tuple[str, ...] = ()


def read_source(args: argparse.Namespace) -> Source:
    """Read the config; a CONFIG with a = in it is an override of the defaults, and the name of a
    known shape stands for --shape.
    """
    words = [args.config, *args.overrides]
    named = [word for word in words if word in model_shapes.SHAPES and not os.path.exists(word)]
    args.shape = [*named, *args.shape]
    path, *overrides = [word for word in words if word not in named] or [""]
    if getattr(args, "maxdiffusion", False):
        config, left_out, notes = AttentionConfig.from_maxdiffusion(path, overrides)
        names = (f"left out: {', '.join(left_out)}",) if left_out else ()
        return Source(config, {}, path, (*notes, *names))
    if not path or ("=" in path and not os.path.exists(path)):
        overrides = tuple(text for text in (path, *overrides) if text)
        return Source(AttentionConfig.from_overrides(overrides), {}, "")
    config = AttentionConfig.from_yaml(path, overrides)
    sections = dict(read(path).data)
    apply_overrides(AttentionConfig, sections, overrides)
    return Source(config, sections, path)


def shapes_of(args: argparse.Namespace, source: Source) -> tuple[Shape, ...]:
    """Return the shapes that the options name, else those of the file's sections."""
    found = tuple(model_shapes.read(text) for text in args.shape)
    found = found or model_shapes.of_sections(source.sections)
    if not found:
        rule = "a plan is made for a shape, and the file's `model` section describes none"
        names = ", ".join(model_shapes.SHAPES)
        remedy = f"add --shape B,T,S,N,H, or --shape with one of {names}"
        raise InputError("shape", "(none)", rule, remedy)
    mask = None if args.mask is None else read_mask(args.mask)
    changes = (args.role, args.dtype, mask, read_batch(args.batch))
    changed = tuple(model_shapes.changed(shape, *changes) for shape in found)
    for shape in changed:
        _check_mask(shape, args.mask or "")
    return changed


def read_batch(value: int | None) -> int | None:
    """Return --batch, which may be absent."""
    if value is not None and whole(value) is None:
        rule = "B is at least 1" if value < 1 else f"B is at most {LARGEST}"
        raise InputError("batch", plain(value), rule, "write --batch 1")
    return value


def _check_mask(shape: Shape, mask: str) -> None:
    """Refuse a mask that does not fit a shape, with the remedy of a command line."""
    try:
        shape.call()
    except InputError as error:
        if "offset" not in error.remedy:
            raise
        remedy = f"leave --mask out for {shape.name}, or give a shape of no more queries than keys"
        raise InputError("--mask", error.value, error.rule, remedy) from None
    check_fits(mask, shape.q_len, shape.kv_len, shape.name)
