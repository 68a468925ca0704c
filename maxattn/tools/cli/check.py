"""Validate a config; print what it sets, the plan of each shape, its memory, and advice.

  maxattn check configs/wan_14b.yml --shape wan-14b-720p --shape wan-14b-cross \\
      --target "TPU v5p" --devices 8 --batch 2
  maxattn check --maxdiffusion base_wan_14b.yml --shape wan-14b-720p --target "TPU v6e"

Wrong keys and values are reported all at once, with file and line; the exit status is then 1, as it
is when a shape cannot run or does not fit.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from maxattn.config import AttentionConfig
from maxattn.config.errors import plain
from maxattn.config.fields import defaults
from maxattn.config.numbers import whole_in
from maxattn.errors import InputError, MaxattnError
from maxattn.explain import explain
from maxattn.plan import Plan, plan
from maxattn.tools.cli.advice import advice, memory_line
from maxattn.tools.cli.machine import machine_arguments, mesh_of, packages_of, target_of
from maxattn.tools.cli.shapes import shape_arguments, shapes_of
from maxattn.tools.cli.source import Source, config_arguments, read_source
from maxattn.tools.memory import estimate, limit, total
from maxattn.tools.model_shapes import Shape, of_sections

_LENGTHS = (
    "real keys of each example, such as 300,512, or of all, such as 300: where"
    " mask_padding_tokens is false, advice says when much padding is attended to; of"
    " padding that is masked nothing is said"
)
_NO_SHAPE = (
    "no shape was given and the file's `model` section describes none: add --shape to see plans"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    config_arguments(parser)
    shape_arguments(parser)
    machine_arguments(parser)
    add = parser.add_argument
    every = "print every key, those at their default too"
    inference = "the forward alone: its block sizes, its memory"
    add("--maxdiffusion", action="store_true", help="CONFIG is a MaxDiffusion YAML")
    add("--all", action="store_true", help=every)
    add("--inference", action="store_true", help=inference)
    add("--lengths", help=_LENGTHS)


def run(args: argparse.Namespace) -> int:
    """Print the resolved config, then each shape."""
    source = read_source(args)
    lengths = _lengths(args.lengths)
    packages_of(args)  # a wrong one is refused without a shape too, and so is a wrong target
    if args.target:
        target_of(args, source.config)
    shapes = shapes_of(args, source) if args.shape or of_sections(source.sections) else ()
    print(f"{source.path or 'the settings'}: valid\n{resolved(source.config, args.all)}")
    for note in source.notes:
        print(f"  note    {note}")
    if not shapes:
        print(f"\n{_NO_SHAPE}")
        return 0
    return _plans(args, source, shapes, lengths)


def _plans(
    args: argparse.Namespace, source: Source, shapes: tuple[Shape, ...], lengths: tuple[int, ...]
) -> int:
    """Print the plan of each shape; return 1 where one cannot run or does not fit."""
    mesh, target = mesh_of(args, source.config), target_of(args, source.config)
    # Lengths are those of the text, unless there is no text.
    padded = "cross" if any(shape.role == "cross" for shape in shapes) else "self"
    known = [(shape, lengths if shape.role == padded else ()) for shape in shapes]
    for shape, real in known:
        _check_lengths(real, shape)
    status = 0
    for shape, real in known:
        try:
            made = plan(shape.call(), source.config, mesh, target)
        except MaxattnError as error:
            print(f"\n{shape.name}\n{error}")
            status = 1
            continue
        print(f"\n{shape.name}\n{of_shape(made, source, not args.inference, real)}")
        status = max(status, int(_too_much(made, not args.inference)))
    return status


def resolved(config: AttentionConfig, every: bool) -> str:
    """Write the keys that differ from their default, or all of them, one a line."""
    standard = defaults(type(config))
    values = {key: getattr(config, key) for key in type(config).model_fields}
    shown = {key: value for key, value in values.items() if every or value != standard[key]}
    lines = [f"  {key}: {_text(value)}" for key, value in shown.items()]
    return "\n".join(lines) or "  every key is at its default"


def _text(value: Any) -> str:
    if hasattr(value, "model_dump"):
        given = {key: size for key, size in value.model_dump().items() if size is not None}
        return "{" + ", ".join(f"{key}: {_text(size)}" for key, size in given.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def of_shape(made: Plan, source: Source, training: bool, lengths: tuple[int, ...]) -> str:
    """Write the plan of one shape with memory and advice; of a forward alone, what it runs with."""
    lines = [explain(made, training), f"  memory  {memory_line(made, training)}"]
    lines += [f"  advice  {line}" for line in advice(made, source.config, training, lengths)]
    return "\n".join(lines)


def _too_much(made: Plan, training: bool) -> bool:
    most = limit(made)
    return most is not None and total(estimate(made, training)) > most


def _lengths(text: str | None) -> tuple[int, ...]:
    numbers = [whole_in(word, least=0) for word in text.split(",")] if text else []
    if None in numbers:
        rule = "they are whole numbers of keys, one an example"
        raise InputError("lengths", plain(text), rule, "write --lengths 300,512")
    return tuple(number for number in numbers if number is not None)


def _check_lengths(lengths: tuple[int, ...], shape: Shape) -> None:
    """Refuse lengths that cannot be those of a shape's examples.

    Raises:
        InputError: for neither one nor B of them, or for more keys than S.
    """
    if not lengths:
        return
    said, batch = plain(",".join(map(str, lengths))), shape.batch
    if len(lengths) not in (1, batch):
        each = f"{shape.name} has B={batch}: a length for each example, or one for all"
        many = "one length" if batch == 1 else f"{batch} lengths, or one"
        remedy = f"write {many}, or add --batch {len(lengths)}"
        raise InputError("lengths", said, f"{each}; here are {len(lengths)}", remedy)
    if max(lengths) > shape.kv_len:
        rule = f"{shape.name} has S={shape.kv_len} keys, and {max(lengths)} is more"
        only = "or name only the shape that they belong to, with --shape"
        raise InputError("lengths", said, rule, f"write at most {shape.kv_len}, {only}")
