"""The extras of pyproject.toml: one bound per package, and combinations that pip can resolve."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from tests.pages import ROOT, text_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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
def pip(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the newest pip as a command, because an old one can search for hours."""
    at = tmp_path_factory.mktemp("pip")
    subprocess.run([sys.executable, "-m", "venv", str(at)], check=True)
    command = [str(at / "bin" / "python"), "-m", "pip"]
    asked = [*command, "install", "--quiet", "--upgrade", "pip"]
    run = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    if run.returncode:
        pytest.skip(f"no package index can be reached: {run.stderr.strip().splitlines()[-1]}")
    return command


def resolve(pip: list[str], python: str, asked: list[str]) -> subprocess.CompletedProcess[str]:
    """Resolve for a Python with wheels only; install nothing."""
    how = ["--dry-run", "--ignore-installed", "--quiet", "--disable-pip-version-check"]
    how += ["--python-version", python, "--only-binary=:all:", "--target", "/nonexistent"]
    command = [*pip, "install", *how, *asked]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "extras"),
    [
        *((python, each) for python in ("3.12", "3.13") for each in largest()),
        *((python, each) for python in ("3.11", "3.14") for each in ("", "cuda13")),
    ],
)
def test_pip_resolves_what_the_page_names(pip: list[str], python: str, extras: str) -> None:
    asked = requirements() + (requirements(*extras.split(",")) if extras else [])
    # Markers are read for the Python that runs pip, so those of another one are not asked for.
    if python == "3.11":
        asked = [each for each in asked if ">= '3.12'" not in each]
    run = resolve(pip, python, [each.partition(";")[0] for each in asked])
    assert run.returncode == 0, run.stderr
