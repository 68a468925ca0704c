"""What is handed out: the wheel alone runs README's first screen, the sdist is the repository, and
pip can resolve the extras of pyproject.toml, which have one bound a package.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import maxattn as ma
from tests.pages import ROOT, blocks, text_of

PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]
PYTHON = "Programming Language :: Python :: "
BUILT = ("egg-info", "PKG-INFO", "setup.cfg")  # what setuptools adds to an sdist
# Weights are written and read without an extra.
WEIGHTS = """
import maxattn as ma
from flax import nnx
attn = ma.FlaxAttention(4, heads=1, dim_head=4, rngs=nnx.Rngs(0))
ma.weights.save_diffusers(attn, "saved")
ma.weights.load_diffusers(attn, "saved")
print(list(attn.to_q.kernel.shape))
"""


def test_the_citation_and_the_changelog_name_this_version() -> None:
    text = text_of("CITATION.cff")
    assert f"\nversion: {ma.__version__}\n" in text and text.startswith("cff-version: 1.2.0\n")
    changes = text_of("CHANGELOG.md")
    newest = re.search(r"^## (\d\S*) - (\S+)$", changes, re.MULTILINE)
    assert newest and newest[1] == ma.__version__
    assert f"\ndate-released: {newest[2]}\n" in text


OPTIONAL = {"matplotlib", "torch"}  # of extras; what kernels need is in their rows
IMPORTED_AS = {"PyYAML": "yaml"}


def test_what_the_package_imports_is_installed_with_it() -> None:
    """Commands need no extra except those that they name."""
    names = [re.split(r"[\[><=]", line)[0] for line in PROJECT["dependencies"]]
    installed = {IMPORTED_AS.get(name, name) for name in names}
    come_along = {"numpy", "ml_dtypes", "pydantic_core", "annotated_types"}  # of jax and pydantic
    found = {
        name.partition(".")[0]
        for path in (ROOT / "maxattn").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _imported(node)
    }
    others = found - sys.stdlib_module_names - {"maxattn"}
    assert others - OPTIONAL <= installed | come_along
    assert "safetensors" in others & installed


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""] if node.level == 0 else []
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_the_classifiers_name_every_python_from_the_oldest_on() -> None:
    said = {each for each in PROJECT["classifiers"] if each.startswith(PYTHON)}
    versions = {each.removeprefix(PYTHON) for each in said if "." in each.removeprefix(PYTHON)}
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert min(versions, key=_minor) == oldest
    first, last = _minor(oldest), max(map(_minor, versions))
    assert versions == {f"3.{minor}" for minor in range(first, last + 1)} and last >= 13


def _minor(version: str) -> int:
    return int(version.partition(".")[2])


def run(*command: object, at: Path) -> str:
    """Run a command without this checkout on the path; return its output."""
    done = attempt(*command, at=at)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def attempt(*command: object, at: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([*map(str, command)], cwd=at, env=env, capture_output=True, text=True)


def environment(at: Path, *packages: object) -> Path:
    """Make a virtual environment with some packages; return its python."""
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
    """Return an sdist and a wheel: those of `make release`, or built here in the same way."""
    if made := os.environ.get("MAXATTN_DIST"):
        (sdist,), (wheel,) = Path(made).glob("*.tar.gz"), Path(made).glob("*.whl")
        return sdist, wheel
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
    (tmp_path / "weights.py").write_text(WEIGHTS)
    assert run(python, "-W", "error", "weights.py", at=tmp_path) == "[4, 4]\n"
    command = [python, "-m", "maxattn", "explain", "attention=auto", "--shape", "wan-1.3b-480p"]
    assert "runs    " in run(*command, "--target", "NVIDIA H200", at=tmp_path)


# ---- extras --------------------------------------------------------------------------------------

EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w.,-]+)\])?([^;]*)(;.*)?")
OF_CUDA = {"12": "cuda12", "13": "cuda13"}


def parts(requirement: str) -> list[str]:
    """Split a requirement into its name, extras, bound and marker, each perhaps empty."""
    found = REQUIREMENT.fullmatch(requirement)
    assert found, requirement
    return [part or "" for part in found.groups()]


def requirements(*extras: str) -> list[str]:
    """List the requirements of an extra, with maxattn's own extras expanded."""
    found = [*PROJECT["dependencies"]] if not extras else []
    for extra in extras:
        for each in EXTRAS[extra]:
            name, inner, *_ = parts(each)
            found += requirements(*inner.split(",")) if name == "maxattn" else [each]
    return found


def combinations() -> list[str]:
    """Return the combinations that the page on hardware names, such as "cuda13,tokamax"."""
    page = text_of("docs/guide/hardware.md")
    table = page[page.index("## Installation by platform") : page.index("FlashAttention-4 needs")]
    return sorted(set(re.findall(r"`\[([\w,]+)\]`", table)))


def largest() -> list[str]:
    """Remove combinations that are part of another one, which covers them."""
    sets = {each: {*each.split(",")} for each in combinations()}
    return [each for each, own in sets.items() if not any(own < other for other in sets.values())]


def test_a_package_has_one_bound_in_all_extras() -> None:
    bounds: dict[str, set[str]] = {}
    for extra in EXTRAS:
        for each in requirements(extra):
            name, _, bound, marker = parts(each)
            bounds.setdefault(name.replace("_", "-"), set()).add(f"{bound}{marker}")
    assert len(bounds) > 15
    assert not {name: sorted(found) for name, found in bounds.items() if len(found) > 1}


def test_extras_of_others_are_written_with_dashes() -> None:
    """pip 23.2 does not find an extra that is written with an underscore, and only warns."""
    for each in [each for extra in EXTRAS for each in requirements(extra)]:
        assert "_" not in parts(each)[1], each


@pytest.mark.parametrize("version", OF_CUDA)
def test_an_extra_of_cuda_has_nothing_of_the_other_cuda(version: str) -> None:
    (other,) = OF_CUDA.keys() - {version}
    text = " ".join(EXTRAS[OF_CUDA[version]])
    assert not re.search(rf"cu(da)?{other}", text)
    assert len(re.findall(rf"cu(?:da)?{version}", text)) == len(EXTRAS[OF_CUDA[version]])


def test_the_page_of_hardware_names_every_extra() -> None:
    named = {extra for each in combinations() for extra in each.split(",")}
    assert named <= EXTRAS.keys() and {"cuda12,tokamax", "cuda13,tokamax"} <= {*combinations()}
    assert EXTRAS.keys() - named == {"te"}, "TransformerEngine is compiled, and said below"


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python with the newest pip: an old one can search for hours."""
    return environment(tmp_path_factory.mktemp("pip") / "newest", "--upgrade", "pip")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "extras"),
    [
        *((python, each) for python in ("3.12", "3.13") for each in largest()),
        *((python, each) for python in ("3.11", "3.14") for each in ("", "cuda13")),
    ],
)
def test_pip_resolves_what_the_page_names(pip: Path, python: str, extras: str) -> None:
    asked = requirements() + (requirements(*extras.split(",")) if extras else [])
    # Markers are read for the Python that runs pip, so those of another one are not asked for.
    if python == "3.11":
        asked = [each for each in asked if ">= '3.12'" not in each]
    how = ["--dry-run", "--ignore-installed", "--quiet", "--disable-pip-version-check"]
    how += ["--python-version", python, "--only-binary=:all:", "--target", "/nonexistent"]
    asked = [each.partition(";")[0] for each in asked]
    run(pip, "-m", "pip", "install", *how, *asked, at=pip.parent)
