"""`maxattn convert` on what is no MaxDiffusion YAML; what it makes of one is in
tests/config/test_maxdiffusion.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden_text import check_golden
from tests.tools.cli.command import run

OURS = sorted(path.name for path in Path("configs").glob("*.yml"))
THEIRS = Path("tests/config/maxdiffusion")


@pytest.mark.parametrize("name", OURS)
def test_a_file_of_ours_is_refused(capsys, name):
    ran = run(capsys, "convert", f"configs/{name}")
    assert (ran.status, ran.out) == (1, "") and f"`maxattn check configs/{name}`" in ran.err


def test_what_is_said_of_it(capsys):
    check_golden("cli/convert/ours", run(capsys, "convert", "configs/wan_14b.yml").text)


def test_check_refuses_it_too(capsys):
    ran = run(capsys, "check", "--maxdiffusion", "configs/wan_14b.yml")
    assert (ran.status, ran.out) == (1, "") and "`maxattn check configs/wan_14b.yml`" in ran.err


def test_what_was_converted_is_ours(capsys, tmp_path):
    (tmp_path / "ours.yml").write_text(run(capsys, "convert", str(THEIRS / "video.yml")).out)
    assert "a file of maxattn's own" in run(capsys, "convert", str(tmp_path / "ours.yml")).err


@pytest.mark.parametrize("text", ["cross_attention: flash\n", "model: {dim: 96}\n"])
def test_a_maxdiffusion_file_with_a_key_of_ours_is_still_theirs(capsys, tmp_path, text):
    (tmp_path / "base.yml").write_text((THEIRS / "video.yml").read_text() + text)
    ran = run(capsys, "convert", str(tmp_path / "base.yml"))
    assert (ran.status, ran.err) == (0, "") and "attention: tokamax_flash" in ran.out
    assert text.partition(":")[0] in ran.out.partition("Left out:")[2]


@pytest.mark.parametrize(
    "text", ["attention: flash\n", "attention: flash\nmodel: wan\nici_context_parallelism: 4\n"]
)
def test_keys_that_both_have_are_converted(capsys, tmp_path, text):
    (tmp_path / "base.yml").write_text(text)
    assert run(capsys, "convert", str(tmp_path / "base.yml")).status == 0
