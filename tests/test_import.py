"""`import maxattn` is fast, starts no backend, and exports the documented names."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

import maxattn as ma
from tests.pages import ROOT

HEAVY = {"jax", "flax", "numpy", "pydantic"}
OPTIONAL = {"matplotlib", "rich", "optax", "orbax", "sklearn", "grain", "transformer_engine"}


def modules_after(*words: str) -> set[str]:
    """Run Python, with warnings as errors; return the modules that are imported at its end."""
    report = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    program = "; ".join((report, *words))
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return set(run.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("words", ["", "--version", "--help", "check --help"])
def test_neither_the_package_nor_its_help_needs_jax(words: str) -> None:
    command = f"from maxattn.tools.cli import main; main({words.split()})"
    assert not modules_after(command if words else "import maxattn") & HEAVY


def test_all_public_names_start_no_backend_and_import_nothing_optional() -> None:
    every = "import maxattn as ma; [getattr(ma, name) for name in ma.__all__]"
    no_backend = "from jax._src import xla_bridge; assert not xla_bridge._backends"
    by_jax = modules_after("import jax, flax.nnx")
    assert not (modules_after(every, no_backend) - by_jax) & (OPTIONAL | {"tokamax", "safetensors"})


def test_every_public_name_is_there_and_documented() -> None:
    for name in ma.__all__:
        assert getattr(ma, name).__doc__, name
    assert {*ma.__all__, "__version__"} <= {*dir(ma)}
    with pytest.raises(AttributeError, match="has no attribute 'flash'"):
        assert ma.flash  # type: ignore[attr-defined]


def test_parts_with_pages_need_no_import_of_their_own() -> None:
    pages = (ROOT / "docs/api").glob("*.md")
    parts = {p for page in pages for p in re.findall(r"e:: maxattn\.(\w+)", page.read_text())}
    assert len(parts) > 5
    for part in parts:  # asked as after a fresh import, before another file imported the part
        assert ma.__getattr__(part) is importlib.import_module(f"maxattn.{part}")


@pytest.mark.slow
def test_any_part_can_be_imported_first() -> None:
    paths = sorted((ROOT / "maxattn").glob("[a-z]*"))
    parts = [path.stem for path in paths if path.suffix in ("", ".py")]
    forget = "[sys.modules.pop(m) for m in [*sys.modules] if m.split('.')[0] == 'maxattn']"
    each = f"[({forget}, import_module(f'maxattn.{{part}}')) for part in {parts}]"
    assert len(parts) > 15 and modules_after("from importlib import import_module", each)
