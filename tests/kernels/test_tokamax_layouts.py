"""Both folders in which tokamax versions have their splash attention, and unknown versions."""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.errors import Unsupported
from maxattn.jax_private.tokamax import FOLDERS, library
from tests.cases import compare
from tests.golden_text import check_golden, check_refused
from tests.reference import attention64

pytest.importorskip("tokamax")
OLD, NEW = FOLDERS
CONFIG = ma.AttentionConfig(attention="tokamax_flash")


def in_the_folder_of_0_0_18(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the installed modules to 0.0.18's folder, and remove them from the old one.

    Except for names these modules are equal in 0.0.17 and 0.0.18.dev20261026.
    """
    here = next(folder for folder in FOLDERS if _is_there(folder))
    (source,) = import_module(here).__path__
    shutil.copytree(source, at / "splash_attention", ignore=shutil.ignore_patterns("*_test.py"))
    for file in (at / "splash_attention").glob("*.py"):
        file.write_text(file.read_text().replace(here, NEW))
    ops = import_module("tokamax._src.ops")
    monkeypatch.setattr(ops, "__path__", [str(at), *ops.__path__])
    _forget(monkeypatch, OLD)


def _forget(monkeypatch: pytest.MonkeyPatch, *gone: str) -> None:
    """Unload the modules of both folders, and make imports of `gone` fail."""
    for name in [name for name in sys.modules if name.startswith(FOLDERS)]:
        monkeypatch.delitem(sys.modules, name)
    for folder in gone:
        monkeypatch.setitem(sys.modules, folder, None)  # type: ignore[arg-type]


def _is_there(folder: str) -> bool:
    try:
        import_module(folder)
    except ModuleNotFoundError:
        return False
    return True


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = {name for name in sys.modules if name.startswith(NEW)}
    in_the_folder_of_0_0_18(tmp_path, monkeypatch)
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith(NEW) and n not in before]:
        del sys.modules[name]


def test_the_kernels_run_from_the_folder_of_0_0_18(moved: Path) -> None:
    assert Path(library().__file__).is_relative_to(moved)
    # A length of no other test, so that nothing is reused that was traced from the other folder.
    q, k, v, dout = np.random.default_rng(0).normal(size=(4, 1, 117, 2, 64)).astype("float32")
    attend = jax.jit(lambda *x: ma.attention(*x, mask=ma.masks.Causal(), config=CONFIG))
    out, vjp = jax.vjp(attend, *map(jnp.asarray, (q, k, v)))
    want = attention64(q, k, v, np.tri(117, dtype=bool), dout=dout)
    got = (out, *vjp(jnp.asarray(dout)))
    compare((got[0], None, *got[1:]), want)


def test_a_third_folder_is_a_refusal_and_no_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget(monkeypatch, *FOLDERS)
    check_refused("refused/tokamax_moved", Unsupported, library)


@pytest.mark.parametrize("device", ["TPU v5p", "cpu", "NVIDIA H100"])
def test_versions_that_are_too_new_are_refused_by_name(device: str) -> None:
    q = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    said = []
    for version in ("0.0.17", "0.0.18.dev20261026", "0.0.19"):
        target = ma.Target.named(device, (("tokamax", version),))
        try:
            ma.plan(ma.Call.of(q, q), CONFIG, target=target)
            said.append(f"# {version}: runs")
        except Unsupported as refused:
            said.append(f"# {version}\n{refused}")
    check_golden(f"refused/tokamax_versions_{device.split()[-1]}", "\n".join(said))
