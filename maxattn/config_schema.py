"""Writes the JSON schema of a config, with which editors complete and check the YAML files.

Run `python -m maxattn.config_schema` after a change of `config.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maxattn.config import AttentionConfig
from maxattn.config_rules import PROGRAM_SECTIONS

SCHEMA_PATH = Path(__file__).with_name("maxattn.schema.json")


def schema() -> dict[str, Any]:
    """Return the schema of `AttentionConfig`, with the program's sections as open objects."""
    made = AttentionConfig.model_json_schema()
    section = {"type": ["object", "null"], "description": "Settings of the program around attention."}
    made["properties"] |= dict.fromkeys(PROGRAM_SECTIONS, section)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def text() -> str:
    """Return the schema as it stands in the committed file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_PATH.write_text(text(), encoding="utf-8")
    print(f"wrote {SCHEMA_PATH}")
