"""The command line as a whole: help, wrong commands, exit status, no traceback, no backend.

Here are the refusals of `maxattn convert`; tests/config/test_maxdiffusion.py has its results.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from maxattn import __version__
from maxattn.tools.cli import COMMANDS
from tests.golden_text import check_golden
from tests.pages import ROOT
from tests.tools.cli.command import run


def test_help_lists_every_command(capsys):
    for words in ((), ("--help",), ("help",)):
        ran = run(capsys, *words)
        assert all(f"  {name} " in ran.out for name in COMMANDS)
        assert ran.status == (0 if words else 2)


def test_version(capsys):
    assert run(capsys, "--version").out == f"maxattn {__version__}\n"


def test_an_unknown_command(capsys):
    ran = run(capsys, "explian")
    assert (ran.status, ran.out) == (2, "") and "did you mean 'explain'?" in ran.err


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(capsys, name):
    ran = run(capsys, name, "--help")
    assert ran.status == 0 and f"usage: maxattn {name}" in ran.out


@pytest.mark.parametrize("name", ["explain", "check"])
def test_the_examples_of_help_run(capsys, monkeypatch, name):
    """Except for those of `compile`, `bench` and `tune`, which take minutes or hardware."""
    monkeypatch.chdir(ROOT)
    text = run(capsys, name, "--help").out.replace("\\\n", " ")
    examples = [line.strip() for line in text.splitlines() if line.startswith("  maxattn ")]
    assert len(examples) >= 2
    for example in examples:
        _, *words = shlex.split(example)
        ran = run(capsys, *words)
        missing = "base_wan_14b.yml" in example  # MaxDiffusion's own file
        assert (ran.status, ran.err) == (0, "") or (missing and "base_wan_14b" in ran.err), example


def test_wrong_usage_is_named(capsys):
    ran = run(capsys, "explain", "attention=auto", "--shap")
    assert ran.status == 2 and "--shap" in ran.err
    assert "required: FILE\n" in run(capsys, "convert").err


def test_mistyped_options_get_a_guess(capsys):
    words = {
        "explain": ["--shpe", "sdxl-64", "--taget=cpu", "--zzz"],
        "check": ["--modle", "--batchs", "2"],
        "compile": ["--target", "v5p", "--trian"],
        "tune": ["--limits", "3"],
        "bench": ["--shaep", "x", "--mask", "casual", "--target", "H200"],
        "convert": ["base.yml", "--outt"],
    }
    said = []
    for command, options in words.items():
        ran = run(capsys, command, *options)
        assert (ran.status, ran.out) == (2, "")
        said.append(ran.err.rstrip())
    check_golden("cli/check/mistyped_options", "\n".join(said))


PROGRAM = """
import shlex
from maxattn.tools.cli import main
words = shlex.split("attention=ring --shape wan-14b-720p --target v5p --mesh context=4")
for command in ("explain", "check"):
    print("STATUS", main([command, *words]))
"""


def test_a_named_target_starts_no_backend():
    """A backend that does not exist would raise if it were started."""
    env = os.environ | {"JAX_PLATFORMS": "no_such_backend"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("STATUS 0\n") == 2 <= ran.stdout.count("ring over 4")


def test_a_closed_pipe_is_no_crash():
    command = [sys.executable, "-m", "maxattn", "check", "attention=auto", "--all"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pipe = subprocess.Popen(command, text=True, **both)
    assert pipe.stdout is not None and pipe.stderr is not None
    pipe.stdout.close()
    assert "Traceback" not in pipe.stderr.read()
    pipe.wait()


# ---- convert -------------------------------------------------------------------------------------

OURS = sorted(path.name for path in Path("configs").glob("*.yml"))
THEIRS = Path("tests/config/maxdiffusion")


@pytest.mark.parametrize("name", OURS)
def test_a_file_of_ours_is_refused(capsys, name):
    ran = run(capsys, "convert", f"configs/{name}")
    assert (ran.status, ran.out) == (1, "") and f"`maxattn check configs/{name}`" in ran.err
    if name == "wan_14b.yml":
        check_golden("cli/convert/ours", ran.text)


def test_check_refuses_it_too(capsys):
    ran = run(capsys, "check", "--maxdiffusion", "configs/wan_14b.yml")
    assert (ran.status, ran.out) == (1, "") and "`maxattn check configs/wan_14b.yml`" in ran.err


def test_what_was_converted_is_ours(capsys, tmp_path):
    (tmp_path / "ours.yml").write_text(run(capsys, "convert", str(THEIRS / "video.yml")).out)
    assert "a maxattn config" in run(capsys, "convert", str(tmp_path / "ours.yml")).err


def test_a_maxdiffusion_file_is_one_problem_however_many_keys_it_has(capsys, tmp_path):
    path, text = tmp_path / "base.yml", (THEIRS / "video.yml").read_text(encoding="utf-8")
    path.write_text(text + "".join(f"key_{i}: 1\n" for i in range(150)), encoding="utf-8")
    ran = run(capsys, "check", str(path))
    assert ran.status == 1 and ran.err.startswith(f"{path}: a MaxDiffusion file\n")
    assert ran.err.count("  remedy  ") == 1


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("wan-14b-480", "did you mean 'wan-14b-480p'?"),
        ("ring", "write attention=ring"),
        ("fallback", "write fallback=VALUE; `maxattn config fallback` lists the values"),
    ],
)
def test_a_word_that_is_no_file_is_what_it_resembles(capsys, word, remedy):
    ran = run(capsys, "check", word)
    assert ran.status == 1 and remedy in ran.err


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
