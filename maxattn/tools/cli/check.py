"""`maxattn check`: what a config sets, then of each shape its plan, its memory, and advice."""

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
from maxattn.plan import plan
from maxattn.tools.cli.advice import advice, memory_line
from maxattn.tools.cli.inputs import Source, mesh_of, packages_of, read_source, shapes_of, target_of
from maxattn.tools.memory import estimate, limit, total
from maxattn.tools.model_shapes import Shape, of_sections

_NO_SHAPE = (
    "no shape was given and the file's `model` section describes none: add --shape to see plans"
)


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
    """Print the plan of each shape; return 1 if one cannot run or does not fit."""
    mesh, target = mesh_of(args, source.config), target_of(args, source.config)
    # Lengths are those of the text, unless there is no text.
    padded = "cross" if any(shape.role == "cross" for shape in shapes) else "self"
    for shape in shapes:
        if lengths and shape.role == padded:
            _check_lengths(lengths, shape)
    training, status = not args.inference, 0
    for shape in shapes:
        try:
            made = plan(shape.call(), source.config, mesh, target)
        except MaxattnError as error:
            print(f"\n{shape.name}\n{error}")
            status = 1
            continue
        real = lengths if shape.role == padded else ()
        lines = [explain(made, training), f"  memory  {memory_line(made, training)}"]
        lines += [f"  advice  {line}" for line in advice(made, source.config, training, real)]
        print(f"\n{shape.name}\n" + "\n".join(lines))
        most = limit(made)
        if most is not None and total(estimate(made, training)) > most:
            status = 1
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


def _lengths(text: str | None) -> tuple[int, ...]:
    numbers = [whole_in(word, least=0) for word in text.split(",")] if text else []
    if None in numbers:
        rule = "they are whole numbers of keys, one an example"
        raise InputError("lengths", plain(text), rule, "write --lengths 300,512")
    return tuple(number for number in numbers if number is not None)


def _check_lengths(lengths: tuple[int, ...], shape: Shape) -> None:
    """Refuse lengths that cannot be those of a shape's examples."""
    given, batch = plain(",".join(map(str, lengths))), shape.batch
    if len(lengths) not in (1, batch):
        each = f"{shape.name} has B={batch}: a length for each example, or one for all"
        many = "one length" if batch == 1 else f"{batch} lengths, or one"
        remedy = f"write {many}, or add --batch {len(lengths)}"
        raise InputError("lengths", given, f"{each}; here are {len(lengths)}", remedy)
    if max(lengths) > shape.kv_len:
        rule = f"{shape.name} has S={shape.kv_len} keys, and {max(lengths)} is more"
        only = "or name only the shape that they belong to, with --shape"
        raise InputError("lengths", given, rule, f"write at most {shape.kv_len}, {only}")
