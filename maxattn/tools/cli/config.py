"""`maxattn config`: lists the keys of a config, or explains some. It reads the JSON schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import maxattn
from maxattn.errors import ConfigError, did_you_mean
from maxattn.measuring.columns import columns

TYPES = {"boolean": "true or false", "integer": "whole number", "array": "list", "object": "keys"}


def run(args: argparse.Namespace) -> int:
    """Print every key, or details of the named keys."""
    known = keys()
    if not args.keys:
        lines = [("key", "value", "default", "meaning")]
        lines += [(key, kind(its), default(its), its["description"]) for key, its in known.items()]
        print("\n".join(columns(lines, len(lines[0]))))
        print("\nmaxattn config KEY prints the values of a key and how it is set")
        return 0
    print("\n\n".join(_explained(key, known) for key in args.keys))
    return 0


def keys() -> dict[str, dict[str, Any]]:
    """Return the schema of each key, with dots for those of a section of maxattn's."""
    path = Path(maxattn.__file__).parent / "maxattn.schema.json"
    return dict(_keys(json.loads(path.read_text(encoding="utf-8"))))


def _keys(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, its in schema["properties"].items():
        if "$ref" not in its:
            yield key, its
            continue
        inner = schema["$defs"][its["$ref"].rpartition("/")[2]]["properties"]
        yield from ((f"{key}.{name}", each) for name, each in inner.items())


def names_of(its: Mapping[str, Any]) -> list[str]:
    """Return the names among which a key's value is chosen; none for a number or a list."""
    if its.get("type") == "boolean":
        return ["true", "false"]
    given = its.get("enum") or [name for each in its.get("anyOf", ()) for name in names_of(each)]
    return [name for name in given if isinstance(name, str)]


def kind(its: Mapping[str, Any]) -> str:
    """Write the type of a key's value, in a word or two."""
    if "enum" in its:
        return "name"
    types = its.get("type") or next((kind(each) for each in its.get("anyOf", ())), "")
    first = types[0] if isinstance(types, list) else types
    return TYPES.get(first, first)


def default(its: Mapping[str, Any]) -> str:
    """Write a key's default as YAML."""
    value = its.get("default")
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return "unset" if value is None else value if isinstance(value, str) else json.dumps(value)


def _range(its: Mapping[str, Any]) -> str:
    """Write the values of a key: names, or the limits of a number."""
    if names := names_of(its):
        return ", ".join(names)
    if its.get("type") == "array":
        return f"a list of {_range(its['items'])}"
    inner = [_range(each) for each in its.get("anyOf", ()) if each.get("type") != "null"]
    if inner:
        return ", or ".join(inner)
    if "const" in its:
        return json.dumps(its["const"])
    return f"{its['minimum']} or more" if "minimum" in its else kind(its)


def _explained(key: str, known: Mapping[str, Mapping[str, Any]]) -> str:
    inner = [name for name in known if name.startswith(f"{key}.")]
    if inner:
        return "\n\n".join(_explained(name, known) for name in inner)
    if key not in known:
        ends = {name.rpartition(".")[2]: name for name in known}
        if key in ends:
            return _explained(ends[key], known)
        remedy = did_you_mean(key, [*known, *ends]) or "maxattn config lists every key"
        raise ConfigError(key, "unknown", "it must be a key of the config", remedy)
    its = known[key]
    lines = [("values", _range(its)), ("default", default(its))]
    if "object" not in its.get("type", ()):
        value = "VALUE" if its.get("default") is None else default(its)
        section, dot, name = key.rpartition(".")
        lines.append(("in a file", f"{section}: {{{name}: {value}}}" if dot else f"{key}: {value}"))
        lines.append(("in a command", quote(f"{key}={value}")))
    text = [f"  {name:<12}  {words}" for name, words in lines]
    return "\n".join((key, f"  {its['description']}", *text))
