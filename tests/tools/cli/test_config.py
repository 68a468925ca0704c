"""`maxattn config` explains each key; its text and the remedies that name it are right."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

import maxattn as ma
from maxattn.config import AttentionConfig
from maxattn.config.settings import FlashBlockSizes
from maxattn.tools.cli.config import default, keys
from tests.golden_text import check_golden
from tests.tools.cli.command import run

SECTIONS = {"model", "data", "training", "sampling", "rollout"}
EXPLAINED = ("attention", "block_q", "mesh_axes", "ulysses_shards", "rollout", "atention", "xyz")


def test_every_key_is_listed_with_its_default(capsys):
    sizes = {f"flash_block_sizes.{key}" for key in FlashBlockSizes.model_fields}
    known = keys()
    assert set(known) - SECTIONS == {*AttentionConfig.model_fields} - {"flash_block_sizes"} | sizes
    ran = run(capsys, "config")
    table = ran.out.split("\n\n")[0].splitlines()[1:]
    assert ran.status == 0 and [line.split()[0] for line in table] == list(known)
    values = AttentionConfig().resolved()
    for key in set(values) - {"flash_block_sizes"}:
        told = default(known[key])
        assert (None if told == "unset" else yaml.safe_load(told)) == values[key]


@pytest.mark.parametrize("key", EXPLAINED)
def test_a_key_is_explained(capsys, key):
    check_golden(f"cli/config/{key}", run(capsys, "config", key).text)


def test_what_it_prints_can_be_written(capsys):
    out = run(capsys, "config", *(key for key in keys() if key not in SECTIONS)).out
    files = re.findall(r"^  in a file +(.*)$", out, re.MULTILINE)
    commands = [shlex.split(text)[0] for text in re.findall(r"  in a command +(.*)\n", out)]
    assert len(files) == len(commands) == len(keys()) - len(SECTIONS)
    plain = [text for text in commands if "VALUE" not in text]
    assert not ma.AttentionConfig.from_overrides(plain).changed
    assert all(yaml.safe_load(text) for text in files)


def test_a_section_is_all_its_keys(capsys):
    assert run(capsys, "config", "flash_block_sizes").out.count("  values ") == 9
