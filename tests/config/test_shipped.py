"""The YAML files in configs/ and the JSON schema agree with the models."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.config import schema as config_schema
from maxattn.config.document import parse
from maxattn.config.rules import PROGRAM_SECTIONS
from maxattn.tools.cli import main

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yml"))
MODELINE = "# yaml-language-server: $schema=../maxattn/maxattn.schema.json"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_loads_and_says_how_it_is_used(path: Path):
    AttentionConfig.from_yaml(path)
    assert parse(path.read_text(), str).data == yaml.safe_load(path.read_text())
    header, body = path.read_text().split("\n\n", 1)
    assert header.splitlines()[0] == MODELINE
    assert all(line.startswith("#") for line in header.splitlines())
    assert re.search(r"^# Needs +\S", header, re.M)
    assert re.search(rf"^# Run .*{path.name}", header, re.M)
    assert ((path.parent / MODELINE.partition("=")[2]).resolve()) == config_schema.SCHEMA_PATH
    assert body.strip()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_command_of_a_header_runs(path: Path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"^# (?:Run|LoRA|Draw|Check) +(.*)$", path.read_text(), re.M)
    assert commands
    for words in map(shlex.split, commands):
        if words[0] == "maxattn":
            assert main(words[1:]) == 0
            said = capsys.readouterr().out
            assert path.name in said and "runs  " in said
        else:
            assert words[0] == "python" and (ROOT / words[1]).exists()
            assert f"configs/{path.name}" in words[2:4]  # behind the family, if there is one


def test_attention_yml_explains_every_key_at_its_default():
    path = ROOT / "configs" / "attention.yml"
    config = AttentionConfig.from_yaml(path)
    assert config == AttentionConfig()
    assert config.model_fields_set == set(AttentionConfig.model_fields)
    assert config.flash_block_sizes.model_fields_set == set(FlashBlockSizes.model_fields)
    for line in path.read_text().splitlines():
        if re.match(r" *[a-z_0-9]+: \S", line):
            assert re.search(r"  # \S.{10,}", line), line


def test_the_committed_schema_has_every_key_with_words():
    text = config_schema.text()
    assert config_schema.SCHEMA_PATH.read_text() == text, "run python -m maxattn.config.schema"
    schema = json.loads(text)
    assert set(schema["properties"]) == {*AttentionConfig.model_fields, *PROGRAM_SECTIONS}
    assert schema["additionalProperties"] is False
    defaults = AttentionConfig().resolved()
    for key, entry in schema["properties"].items():
        assert entry["description"].endswith("."), key
        if key in defaults and key != "flash_block_sizes":
            assert entry["default"] == defaults[key]
    sizes = schema["$defs"]["FlashBlockSizes"]["properties"]
    assert set(sizes) == set(FlashBlockSizes.model_fields) and len(sizes) == 9
    assert "cudnn_flash_te" in schema["properties"]["attention"]["enum"]
    for name in PROGRAM_SECTIONS:
        assert "object" in schema["properties"][name]["type"]
    for properties in (schema["properties"], sizes):
        words = [e["description"] for key, e in properties.items() if key not in PROGRAM_SECTIONS]
        assert all(words) and len(set(words)) == len(words)
