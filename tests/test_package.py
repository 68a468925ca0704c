"""What is handed out: the wheel alone runs README's first screen, the sdist is the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import maxattn as ma
from tests.pages import ROOT, blocks

BUILT = ("egg-info", "PKG-INFO", "setup.cfg")  # what setuptools adds to an sdist


def test_the_citation_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {ma.__version__}\n" in text and text.startswith("cff-version: 1.2.0\n")


def run(*command: object, at: Path) -> str:
    """Run a command without this checkout on the path; return what it prints."""
    done = attempt(*command, at=at)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def attempt(*command: object, at: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([*map(str, command)], cwd=at, env=env, capture_output=True, text=True)


def environment(at: Path, *packages: object) -> Path:
    """Make a virtual environment of some packages; return its python."""
    run(sys.executable, "-m", "venv", at, at=at.parent)
    python = at / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = attempt(*pip, *packages, at=at)
    if done.returncode and "connection" in done.stderr.lower():
        pytest.skip(f"no package index can be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return python


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build an sdist, and from it a wheel; return both. twine finds nothing wrong with them."""
    at = tmp_path_factory.mktemp("built")
    python = environment(at / "tools", "build", "twine")
    run(python, "-m", "build", "--outdir", at / "dist", ROOT, at=at)
    (sdist,), (wheel,) = (at / "dist").glob("*.tar.gz"), (at / "dist").glob("*.whl")
    run(python, "-m", "twine", "check", "--strict", sdist, wheel, at=at)
    return sdist, wheel


@pytest.mark.slow
def test_the_sdist_is_the_repository(built: tuple[Path, Path]) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files are the repository's")
    with tarfile.open(built[0]) as tar:
        names = {m.name.partition("/")[2] for m in tar.getmembers() if m.isfile()}
    tracked = set(run("git", "ls-files", at=ROOT).splitlines())
    assert {name for name in names if not any(word in name for word in BUILT)} == tracked


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[1]).namelist()
    inside = {name for name in names if ".dist-info/" not in name}
    tracked = run("git", "ls-files", "maxattn", at=ROOT).splitlines()
    assert inside == set(tracked)


@pytest.mark.slow
def test_the_wheel_alone_runs_the_first_screen(built: tuple[Path, Path], tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", built[1])
    config, program, shown = [*blocks("README.md")][:3]
    (tmp_path / "attention.yml").write_text(config.text)
    (tmp_path / "first.py").write_text(program.text)
    printed = run(python, "-W", "error", "first.py", at=tmp_path)
    assert printed.splitlines()[0] == shown.text.splitlines()[0]
    command = [python, "-m", "maxattn", "explain", "attention=auto", "--shape", "wan-1.3b-480p"]
    assert "runs    " in run(*command, "--target", "NVIDIA H200", at=tmp_path)
