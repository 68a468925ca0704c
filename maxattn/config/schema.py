"""Writes the JSON schema of a config, for editors that complete and check YAML files.

Run `python -m maxattn.config.schema` after you change `settings.py`.
"""

from __future__ import annotations

import ast
import inspect
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from maxattn.config.rules import PROGRAM_SECTIONS
from maxattn.config.settings import AttentionConfig, FlashBlockSizes

SECTION = {"type": ["object", "null"], "description": "Settings of the program around attention."}
SCHEMA_PATH = Path(__file__).parents[1] / "maxattn.schema.json"


def schema() -> dict[str, Any]:
    """Return the schema of `AttentionConfig`; it allows any key in `PROGRAM_SECTIONS`."""
    made = AttentionConfig.model_json_schema()
    _describe(made, AttentionConfig)
    _describe(made["$defs"]["FlashBlockSizes"], FlashBlockSizes)
    made["properties"] |= dict.fromkeys(PROGRAM_SECTIONS, SECTION)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Copy the first line of a model's docstring, and its fields' docstrings, to the schema."""
    schema["description"] = (inspect.getdoc(model) or "").partition("\n")[0]
    for name, words in field_docs(model).items():
        schema["properties"][name]["description"] = words


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Read the docstring after each field in the source."""
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return found


def text() -> str:
    """Return the text of `maxattn.schema.json`."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_PATH.write_text(text(), encoding="utf-8")
    print(f"wrote {SCHEMA_PATH}")
