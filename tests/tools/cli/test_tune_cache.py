"""Where `maxattn tune` keeps measurements: no home folder, a folder that nobody may write to."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import jax.numpy as jnp
import pytest

import maxattn as ma
from maxattn import tuned
from maxattn.errors import ConfigError
from tests.golden_text import check_golden
from tests.tools.cli.command import run
from tests.tools.tune.small import BLOCKWISE


def test_without_a_home_the_variable_is_named(capsys, cache, monkeypatch):
    """As in a container of a user who stands in no table of users."""
    monkeypatch.delenv(tuned.VARIABLE)
    monkeypatch.setattr(Path, "home", no_home)
    ran = run(capsys, "tune", *BLOCKWISE, "--limit", "1")
    check_golden("cli/tune/no_home", ran.text)
    ma.attention(*(jnp.ones((1, 8, 2, 8)),) * 3)  # which reads the cache, and needs none


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="nothing here is read-only to root")
def test_a_cache_that_cannot_be_written_is_said_once(capsys, cache, monkeypatch):
    monkeypatch.setenv(tuned.VARIABLE, "/proc/maxattn")
    ran = run(capsys, "tune", *BLOCKWISE, "--shape", "1,200,200,2,8", "--limit", "2")
    assert ran.status == 0 and ran.out.count("cannot be written") == 1
    text = re.sub(r"\d[\d.,]* ms( +)?", "# ms ", ran.out)
    text = re.sub(r"[\d.]+ times", "# times", text)
    check_golden("cli/tune/read_only", re.sub(r"(chunk_size:?) \d+", r"\1 #", text))
    assert not any(tempfile.gettempdir() in line for line in ran.out.splitlines())


def test_what_was_measured_is_read_from_a_cache_that_cannot_be_written(
    capsys, cache, monkeypatch, tmp_path
):
    run(capsys, "tune", *BLOCKWISE, "--limit", "2")
    before = cache.read_text()
    monkeypatch.setattr(
        "maxattn.tools.tune.store.unwritable",
        lambda *_: ConfigError("", "", "it may not be written", ""),
    )
    ran = run(capsys, "tune", *BLOCKWISE, "--limit", "2")
    assert ran.status == 0 and ran.out.count("(measured before)") == 2
    assert cache.read_text() == before and sorted(p.name for p in tmp_path.iterdir()) == [
        "tuned.json", "tuned.lock",
    ]  # fmt: skip
