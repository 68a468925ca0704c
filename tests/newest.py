"""Run a part of the tests on the newest installed Python, with the newest packages.

`python -m tests.newest` needs only the standard library. It makes `.venv-newest`, with the newest
jax, flax and tokamax that pip finds for that Python, and runs the tests that break first when those
packages change. Without a newer Python, or without a package index, it prints so and does nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
HERE = ROOT / ".venv-newest"
Version = tuple[int, int, int]
"""Major, minor, patch."""
PROBE = "import sys; print(*sys.version_info[:3])"
# What takes hold of insides of jax, flax and tokamax, and pairs of what everything else is made of.
FILES = (
    "test_import.py", "test_target.py", "test_remat.py",  # versions, warnings, saved names
    "kernels/test_matrix.py",                             # every kernel against float64
    "kernels/test_tokamax.py",
    "sharding/test_explicit.py", "steps/test_steps.py",
    "modules/test_explicit.py", "modules/test_adapters.py",
    "modules/test_linen.py", "modules/test_swap.py",
)  # fmt: skip


def main(arguments: Sequence[str] = ()) -> int:
    """Run the tests and return their exit status, or 0 if nothing can be run, with a message."""
    named = os.environ.get("MAXATTN_NEWEST_PYTHON")
    python = Path(named) if named else environment(newer(found(), sys.version_info[:2]))
    return tests(python, arguments) if python else 0


def found() -> list[Path]:
    """List the Pythons on the path, and those that pyenv keeps."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = (shutil.which(f"python3.{minor}") for minor in range(12, 30))
    return [*(Path(path) for path in on_path if path), *sorted(kept.glob("3.*/bin/python"))]


def newer(pythons: Iterable[Path], own: tuple[int, int]) -> list[Path]:
    """Return those with a newer minor version than `own`, newest first, one per minor version."""
    newest: dict[tuple[int, int], tuple[Version, Path]] = {}
    for python in pythons:
        version = version_of(python)
        if version and version[:2] > own:
            newest[version[:2]] = max(newest.get(version[:2], (version, python)), (version, python))
    return [python for _, python in sorted(newest.values(), reverse=True)]


def version_of(python: Path) -> Version | None:
    """Ask a Python for its version; None if it does not run, or is not a release."""
    run = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    numbers = re.fullmatch(r"(\d+) (\d+) (\d+)\n", run.stdout)
    if run.returncode or not numbers:
        return None
    major, minor, patch = map(int, numbers.groups())
    return major, minor, patch


def environment(pythons: Iterable[Path]) -> Path | None:
    """Make an environment of the first Python that has all packages; None if no Python does."""
    for base in pythons:
        subprocess.run([base, "-m", "venv", "--clear", HERE], check=True)
        python = HERE / ("Scripts" if os.name == "nt" else "bin") / "python"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--upgrade", "--no-compile"]  # most files are never imported
        runs = (
            subprocess.run([*pip, *packages], capture_output=True, text=True)
            for packages in (["pip"], ["-e", f"{ROOT}[dev]"])
        )
        failed = next((run.stderr.strip() for run in runs if run.returncode), None)
        if failed is None:
            return python
        print(f"tests on the newest Python: pip finds no packages for {base}: {failed[-200:]}")
    print(f"tests on the newest Python: none newer than {sys.version.split()[0]} has them here")
    print("tests on the newest Python: skipped; MAXATTN_NEWEST_PYTHON can name one with packages")
    return None


def tests(python: Path, arguments: Sequence[str]) -> int:
    """Print the versions and run the tests, with a Python that has the packages."""
    names = ("jax", "flax", "tokamax")
    say = f"from importlib.metadata import version as v; print(*(n + ' ' + v(n) for n in {names}))"
    subprocess.run([python, "-c", f"import sys; print('Python', sys.version); {say}"], check=True)
    files = [str(ROOT / "tests" / file) for file in FILES]
    command = [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", *arguments, *files]
    # This checkout, whatever the environment has installed.
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
