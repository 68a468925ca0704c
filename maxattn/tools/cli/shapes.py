"""Shapes on a command line: --shape, --role, --dtype, --batch and --mask."""

from __future__ import annotations

import argparse

from maxattn.config.errors import plain
from maxattn.config.numbers import LARGEST, whole
from maxattn.errors import InputError
from maxattn.tools import model_shapes
from maxattn.tools.cli.masks import check_fits, read_mask
from maxattn.tools.cli.source import Source
from maxattn.tools.model_shapes import Shape

_SHAPE = (
    "may stand several times; default the shapes of the file's model; names: "
    + ", ".join(model_shapes.SHAPES)
)  # fmt: skip
_MASK = (
    "full, causal, window:LEFT,RIGHT, block-window:BLOCK,WINDOW, block-causal:N, "
    "rectangle:Q_START,Q_STOP,KV_START,KV_STOP[,Q_START,...] (queries that see keys; one or more), "
    "segments:LENGTH,LENGTH,... (known when traced), segment-ids:LENGTH,LENGTH,... (an array), "
    "lengths:KEYS,KEYS,... (an array, of each batch row), "
    "video:FRAMES,TOKENS[,PER_BLOCK[,WINDOW[,SINK]]], "
    "teacher:... (the same numbers, of a clean video and the noisy one), joined by + (and)"
)


def shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is computed."""
    add = parser.add_argument
    add("--shape", action="append", default=[], metavar="NAME|B,T,S,N,H[/V][,K]", help=_SHAPE)
    add("--role", choices=("self", "cross"), help="default self where T = S, else cross")
    add("--dtype", help="of q, k and v: bf16 (default), f16 or f32")
    add("--batch", type=int, help="B in place of the shape's")
    add("--mask", help=_MASK)


def shapes_of(args: argparse.Namespace, source: Source) -> tuple[Shape, ...]:
    """Return the shapes that the options name, else those of the file's sections.

    Raises:
        InputError: for a wrong spelling, or when there is none.
    """
    found = tuple(model_shapes.read(text) for text in args.shape)
    found = found or model_shapes.of_sections(source.sections)
    if not found:
        rule = "a plan is made for a shape, and the file's `model` section describes none"
        names = ", ".join(model_shapes.SHAPES)
        remedy = f"add --shape B,T,S,N,H, or --shape with one of {names}"
        raise InputError("shape", "(none)", rule, remedy)
    mask = None if args.mask is None else read_mask(args.mask)
    changes = (args.role, args.dtype, mask, read_batch(args.batch))
    changed = (model_shapes.changed(shape, *changes) for shape in found)
    return tuple(_fitting(shape, args.mask or "") for shape in changed)


def read_batch(value: int | None) -> int | None:
    """Return what --batch says.

    Raises:
        InputError: for no size of a batch.
    """
    if value is not None and whole(value) is None:
        rule = "B is at least 1" if value < 1 else f"B is at most {LARGEST}"
        raise InputError("batch", plain(value), rule, "write --batch 1")
    return value


def _fitting(shape: Shape, mask: str) -> Shape:
    """Return a shape that its mask fits.

    Args:
        shape: with the mask.
        mask: as it is written; empty for none.

    Raises:
        InputError: with what can be written here, where the library would have an argument given.
    """
    try:
        shape.call()
    except InputError as error:
        if "offset" not in error.remedy:
            raise
        remedy = f"leave --mask out for {shape.name}, or give a shape of no more queries than keys"
        raise InputError("--mask", error.value, error.rule, remedy) from None
    check_fits(mask, shape.q_len, shape.kv_len, shape.name)
    return shape
