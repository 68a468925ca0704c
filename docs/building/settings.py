"""The list of the config's keys: default, meaning and values, from its schema."""

from __future__ import annotations

from typing import Any

import yaml

from maxattn.config.schema import schema


def text() -> str:
    """List the keys of `AttentionConfig`, then those of `flash_block_sizes`."""
    whole = schema()
    sizes = whole["$defs"]["FlashBlockSizes"]["properties"]
    keys = {k: v for k, v in whole["properties"].items() if "default" in v}
    below = {f"flash_block_sizes.{key}": value for key, value in sizes.items()}
    whole_list = {k: v for k, v in keys.items() if k != "flash_block_sizes"} | below
    return "\n\n".join(entry(key, of_key) for key, of_key in whole_list.items())


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
