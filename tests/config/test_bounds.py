"""Files and overrides of any size are read or refused in bounded time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from maxattn.config import AttentionConfig, ConfigErrors
from maxattn.config.document import MOST_BYTES, MOST_NODES, parse
from maxattn.config.errors import show
from maxattn.config.numbers import DEEPEST
from tests.golden_text import check_golden
from tests.within import within


def doubled(levels: int, each: int, entry: str = "[{}]", first: str = "[x]") -> str:
    """Write nested aliases: each level has the level before several times."""
    lines = [f"  a0: &a0 {first}"]
    for level in range(1, levels):
        names = ", ".join([f"*a{level - 1}"] * each)
        lines.append(f"  a{level}: &a{level} {entry.format(names)}")
    return "model:\n" + "\n".join(lines) + "\n"


BOMBS = {
    "aliases": doubled(10, 9),
    "merged_and_named": doubled(10, 9, "{{<<: [{0}], b: [{0}]}}", "{x: 1}"),
    "keys": doubled(30, 2, "{{? [{}] : 1}}"),
    "brackets": "model: " + "[" * 1000 + "]" * 1000,
    "open_brackets": "model: " + "[" * 100_000,
    "indented": "\n".join(" " * i + "a:" for i in range(1000)),
    "nodes": "model:\n" + "- a\n" * 20_000,
    "unknown_keys": "".join(f"key_{i}: 1\n" for i in range(400)),
    "too_large": "# " + "x" * MOST_BYTES,
    "digits": "query_chunk_size: " + "9" * 5000,
    "tagged_digits": "query_chunk_size: !!int " + "9" * 5000,
    "sixties": "query_chunk_size: !!int " + "1:" * 100_000 + "1",
    "float_sixties": "query_chunk_size: !!float " + "1:" * 100_000 + "1",
    "long_key": "x" * 50_000 + ": 1",
    "long_value": "attention: " + "x" * 50_000,
    "devices": f"{{attention: ulysses_ring, ulysses_shards: 3, ici_context_parallelism: {2**62}}}",
    "most_devices": "{attention: ulysses_ring, ulysses_shards: 3, ici_context_parallelism: 1048576,"
    " dcn_context_parallelism: 1048576}",
    "large": f"query_chunk_size: {2**31}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_of_any_kind_is_refused_in_bounded_time(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("any.yml").write_text(BOMBS[name])
    with within(30), suppress(ConfigErrors):
        AttentionConfig.from_maxdiffusion("any.yml")
    with within(30), pytest.raises(ConfigErrors) as error:
        AttentionConfig.from_yaml("any.yml")
    assert all(len(str(problem)) < 3000 for problem in error.value.problems)
    check_golden(f"config_bounds/file_{name}", str(error.value)[:700])


def test_as_many_nodes_and_levels_as_are_allowed_are_read():
    assert len(parse("- a\n" * (MOST_NODES - 1), str).data) == MOST_NODES - 1
    data = parse("[" * DEEPEST + "]" * DEEPEST, str).data
    assert show(data).startswith("[[[")
    shared = parse("a: &a {x: 1}\nb: {<<: *a}\nc: [*a, *a]", str).data
    assert shared == {"a": {"x": 1}, "b": {"x": 1}, "c": [{"x": 1}, {"x": 1}]}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


OVERRIDES = {
    "deep": {"query_chunk_size": deep(100_000)},
    "deep_text": ["query_chunk_size=" + "[" * 5000],
    "digits": {"query_chunk_size": 10**5000},
    "digits_of_text": ["query_chunk_size=" + "9" * 5000],
    "dots": [".".join("a" * 5000) + "=1"],
    "long": ["attention=" + "x" * 10**5],
    "aliases": ["model={" + doubled(9, 9).partition("\n")[2].strip().replace("\n ", ",") + "}"],
}  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_of_any_size_is_refused(name):
    with within(), pytest.raises(ConfigErrors) as error:
        AttentionConfig.from_overrides(OVERRIDES[name])
    assert len(str(error.value)) < 3000
    check_golden(f"config_bounds/override_{name}", str(error.value))


@pytest.mark.parametrize(
    "value", [10**5000, -(10**5000), 2**31, deep(5000), "9" * 5000], ids=lambda v: type(v).__name__
)
def test_a_setting_of_any_size_is_refused(value):
    keys = ("query_chunk_size", "ici_data_parallelism", "attention", "deterministic", "mesh_axes")
    for wrong in (*({key: value} for key in keys), {"flash_block_sizes": {"block_q": value}}):
        with pytest.raises(ConfigErrors) as error:
            AttentionConfig(**wrong)
        assert len(str(error.value)) < 3000


@pytest.mark.parametrize("path", ["a\0b.yml", "x" * 300 + ".yml", "\ud800.yml", "/dev/null/x.yml"])
def test_a_path_that_no_file_has_is_refused(path):
    with pytest.raises(ConfigErrors) as error:
        AttentionConfig.from_yaml(path)
    assert error.value.remedy


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_a_file_without_an_end_is_refused():
    with within(), pytest.raises(ConfigErrors, match="bytes"):
        AttentionConfig.from_yaml("/dev/zero")


@pytest.mark.skipif(os.getuid() == 0, reason="root may look into every folder")
def test_a_folder_that_may_not_be_looked_into(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(ConfigErrors):
        AttentionConfig.from_yaml(tmp_path / "closed" / "a.yml")
