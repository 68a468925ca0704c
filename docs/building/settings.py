"""The lists of the keys of `AttentionConfig` and of `StepSettings`, with default and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from maxattn.config.schema import field_docs, schema
from maxattn.steps import StepSettings, settings


def text() -> str:
    """List the keys of `AttentionConfig`, then those of `flash_block_sizes`."""
    whole = schema()
    sizes = whole["$defs"]["FlashBlockSizes"]["properties"]
    keys = {k: v for k, v in whole["properties"].items() if "default" in v}
    below = {f"flash_block_sizes.{key}": value for key, value in sizes.items()}
    whole_list = {k: v for k, v in keys.items() if k != "flash_block_sizes"} | below
    return "\n\n".join(entry(key, of_key) for key, of_key in whole_list.items())


def of_steps() -> str:
    """List the keys of `StepSettings`, each with those below it."""
    return "\n\n".join(_of_steps(StepSettings, ""))


def _of_steps(section: type[BaseModel], above: str) -> Iterator[str]:
    for key, words in field_docs(section).items():
        field = section.model_fields[key]
        required = field.is_required()
        default = "" if required else f": {yaml.safe_dump(field.default).split(chr(10))[0]}"
        yield f"`{above}{key}{default}`\n: {words}" + " Required." * required
        for below in _sections_in(field.annotation):
            yield from _of_steps(below, f"{above}{key}.")


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a type names, such as that of `X | None` or `tuple[X, ...]`."""
    if getattr(annotation, "__module__", "") == settings.__name__:
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def entry(key: str, schema: dict[str, Any]) -> str:
    """Describe one key, at its default, as an item of a definition list."""
    default = yaml.safe_dump(schema.get("default"), default_flow_style=True).split("\n")[0]
    return f"`{key}: {default}`\n: {schema['description']}\n: Values: {values(schema)}."


def values(schema: dict[str, Any]) -> str:
    """Say what a value may be."""
    return ", ".join(dict.fromkeys(_values(schema)))


def _values(schema: dict[str, Any]) -> list[str]:
    if "anyOf" in schema:
        return [part for each in schema["anyOf"] for part in _values(each)]
    if "enum" in schema:
        return [f"`{value}`" for value in schema["enum"]]
    if "const" in schema:
        return [f"`{schema['const']}`"]
    kind = schema.get("type")
    if kind == "array":
        return [f"a list of {', '.join(_values(schema['items']))}"]
    if kind == "integer" or "minimum" in schema:
        return [f"{schema['minimum']} or more" if "minimum" in schema else "a whole number"]
    return {"boolean": ["`true`", "`false`"], "null": ["`null`"]}.get(kind or "", [str(kind)])
