"""A missing package of the examples raises one error that tells how to install it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from maxattn_examples.common import OF_EXTRA, missing

from tests.golden_text import check_golden
from tests.waiting import but

ROOT = Path(__file__).parents[3]
IMPORTED_AS = {
    "orbax-checkpoint": "orbax",
    "scikit-learn": "sklearn",
    "pillow": "PIL",
    "imageio-ffmpeg": "imageio_ffmpeg",
}
RUN = """
import runpy, sys
package, script, *arguments = sys.argv[1:]
sys.modules[package] = None
sys.path[0], sys.argv = "examples", [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


COMMANDS = [("PIL", "train", "wan_tiny"), ("optax", "train", "sdxl")]
COMMANDS += [("rich", "generate", "sdxl")]


@pytest.mark.parametrize(("package", "script", "config"), but(COMMANDS, COMMANDS[:1]))
def test_a_missing_package_is_one_error(package: str, script: str, config: str) -> None:
    words = (package, f"examples/{script}.py", f"configs/{config}.yml")
    command = [sys.executable, "-c", RUN, *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert run.returncode == 1
    assert not run.stdout
    check_golden(f"training/without_{package}", run.stderr)


def test_the_packages_are_those_of_the_extras() -> None:
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, packages in OF_EXTRA.items():
        names = [re.split(r"[\[><=]", line)[0] for line in said["optional-dependencies"][extra]]
        names += ["maxattn", "jax", "flax"] if extra == "examples" else []
        assert set(packages) == {IMPORTED_AS.get(name, name) for name in names}


def test_other_errors_are_not_ours() -> None:
    assert not missing(ModuleNotFoundError("No module named 'mine'", name="mine"))
    assert not missing(ModuleNotFoundError("halted"))
    assert not missing(ImportError("cannot import name", name="jax"))
