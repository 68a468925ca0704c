"""Validate a config, print what it sets, the plan of each shape, what memory it takes, and what to
look at.

  maxattn check configs/wan_14b.yml --shape wan-14b-720p --shape wan-14b-cross --target "TPU v5p"
  --devices 8 maxattn check --maxdiffusion base_wan_14b.yml --shape wan-14b-720p --target "TPU v6e"

Wrong keys and values are reported all at once, with file and line; the exit status is then 1, as it
is when a shape cannot run or does not fit.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from maxattn.config import AttentionConfig
from maxattn.config.fields import defaults
from maxattn.errors import InputError, MaxattnError
from maxattn.explain import explain
from maxattn.plan import Plan, plan
from maxattn.tools.cli import common
from maxattn.tools.cli.advice import advice, memory_line
from maxattn.tools.cli.common import Source
from maxattn.tools.memory import estimate, limit, total
from maxattn.tools.model_shapes import Shape

HELP = "validate a config; print what it sets, its plans, memory and advice"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    common.config_arguments(parser)
    common.shape_arguments(parser)
    common.machine_arguments(parser)
    parser.add_argument("--maxdiffusion", action="store_true", help="CONFIG is a MaxDiffusion YAML")
    parser.add_argument(
        "--all", action="store_true", help="print every key, those at their default too"
    )
    parser.add_argument(
        "--inference", action="store_true", help="the forward alone: its block sizes, its memory"
    )
    parser.add_argument(
        "--lengths",
        help=(
            "real keys of each example, such as 300,512, or of all, such as 300: where"
            " mask_padding_tokens is false, advice says when much padding is attended to; of"
            " padding that is masked nothing is said"
        ),
    )


def run(args: argparse.Namespace) -> int:
    """Print the resolved config, then each shape."""
    source = common.read_source(args)
    lengths = _lengths(args.lengths)
    common.packages_of(args)  # a wrong one is refused without a shape too
    print(f"{source.path or 'the settings'}: valid\n{resolved(source.config, args.all)}")
    for note in source.notes:
        print(f"  note    {note}")
    shapes = common.shapes_of(args, source) if args.shape or _describes_shapes(source) else ()
    if not shapes:
        print(
            "\nno shape was given and the file's `model` section describes none: add --shape to see"
            " plans"
        )
        return 0
    mesh, target = common.mesh_of(args, source.config), common.target_of(args, source.config)
    status = 0
    # Lengths are those of the text, unless there is no text.
    padded = "cross" if any(shape.role == "cross" for shape in shapes) else "self"
    for shape in shapes:
        if shape.role == padded:
            _check_lengths(lengths, shape)
    for shape in shapes:
        try:
            made = plan(shape.call(), source.config, mesh, target)
        except MaxattnError as error:
            print(f"\n{shape.name}\n{error}")
            status = 1
            continue
        known = lengths if shape.role == padded else ()
        print(f"\n{shape.name}\n{of_shape(made, source, not args.inference, known)}")
        status = max(status, int(_too_much(made, not args.inference)))
    return status


def resolved(config: AttentionConfig, every: bool) -> str:
    """Write the keys that differ from their default, or all of them, one a line."""
    standard = defaults(type(config))
    lines = []
    for key in type(config).model_fields:
        value = getattr(config, key)
        if every or value != standard[key]:
            lines.append(f"  {key}: {_text(value)}")
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


def _describes_shapes(source: Source) -> tuple[Shape, ...]:
    from maxattn.tools.model_shapes import of_sections

    return of_sections(source.sections)


def _lengths(text: str | None) -> tuple[int, ...]:
    numbers = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() for word in numbers):
        raise InputError(
            "lengths",
            text,
            "they are whole numbers of keys, one an example",
            "write --lengths 300,512",
        )
    return tuple(map(int, numbers))


def _check_lengths(lengths: tuple[int, ...], shape: Shape) -> None:
    """Refuse lengths that cannot be those of a shape's examples.

    Raises:
        InputError: for neither one nor B of them, or for more keys than S.
    """
    if not lengths:
        return
    said, batch = ",".join(map(str, lengths)), shape.batch
    if len(lengths) not in (1, batch):
        rule = (
            f"{shape.name} has B={batch}: a length for each example, or one for all; here are"
            f" {len(lengths)}"
        )
        many = "one length" if batch == 1 else f"{batch} lengths, or one"
        raise InputError("lengths", said, rule, f"write {many}, or add --batch {len(lengths)}")
    if max(lengths) > shape.kv_len:
        rule = f"{shape.name} has S={shape.kv_len} keys, and {max(lengths)} is more"
        remedy = (
            f"write at most {shape.kv_len}, or name only the shape that they belong to, with"
            " --shape"
        )
        raise InputError("lengths", said, rule, remedy)
