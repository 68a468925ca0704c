"""What is tokamax's own: its schedule of tiles, its exp2 and base-2 LSE, rings over it, the folders
that it has kept its splash attention in, versions beyond them, a fence in its kernel for GPUs.
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.block_sizes import BlockSizes
from maxattn.errors import Unsupported
from maxattn.jax_private.tokamax import FOLDERS, library
from maxattn.jax_private.versions import TOKAMAX_ON_GPU, numbers
from maxattn.kernels.splash.tokamax import steps
from maxattn.kernels.tokamax_flash import TokamaxFlash
from tests.cases import compare
from tests.golden_text import check_golden, check_refused
from tests.jaxprs import equations
from tests.kernels.test_flash import POSITIONS, whole
from tests.reference import attention64
from tests.waiting import but

pytest.importorskip("tokamax")
SIZES = BlockSizes(128, 128, 128, 128, 256, 128, use_fused_bwd_kernel=True)
OLD, NEW = FOLDERS
CONFIG = ma.AttentionConfig(attention="tokamax_flash")


@pytest.mark.parametrize("density", [0.0, 0.1, 0.6, 1.0])
def test_the_steps_are_the_tiles_that_are_not_empty(density: float) -> None:
    rng = np.random.default_rng(3)
    marks = ((rng.random((9, 13)) < density) * rng.integers(1, 3, (9, 13))).astype(np.int8)
    want = [(i, j, marks[i, j]) for i in range(9) for j in range(13) if marks[i, j]]
    row, column, flat, count = jax.jit(steps)(jnp.asarray(marks))
    n = int(count[0])
    assert [tuple(map(int, x)) for x in zip(row[:n], column[:n], flat[:n], strict=True)] == want
    assert (np.asarray(row)[n:] == -1).all()
    static = [*zip(*(x.tolist() for x in steps(marks)[:3]), strict=True)]
    # A grid has a step at least; where nothing is visited it computes a tile that is thrown away.
    assert static == (want or [(0, 0, 1)])


MERGED = [("full", True), ("blocks", True), ("video", True), ("blocks", False)]


@pytest.mark.parametrize(("name", "base2"), but(MERGED, MERGED[:3]))
def test_shards_with_traced_offsets_and_a_merged_lse(name: str, base2: bool) -> None:
    kernel = TokamaxFlash(64**-0.5, SIZES, interpret=True, use_base2_exp=base2)
    compare(*whole(POSITIONS[name], kernel))


def test_exp2_in_bfloat16_has_no_bias() -> None:
    """log2(e) rounded to bfloat16 is 0.18% too large, which would shift every LSE."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(3 * rng.normal(size=(1, 256, 2, 128)), "bfloat16") for _ in range(3))
    _, lse = ma.attention(q, k, v, config=CONFIG.replace(use_base2_exp=True), return_lse=True)
    assert abs(float(np.mean(np.asarray(lse, np.float64) - attention64(q, k, v).lse))) < 2e-3


# ---- its folders ---------------------------------------------------------------------------------


def in_the_folder_of_0_0_18(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the installed modules where 0.0.18's nightlies have them, and nothing in the old place.

    Beside their names nothing of these modules differs between 0.0.17 and 0.0.18.dev20261026.
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
    """Forget what was imported from both folders, and let imports of `gone` fail."""
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
    for number in ("0.0.17", "0.0.18.dev20261026", "0.0.19"):
        target = ma.Target.named(device, (("tokamax", number),))
        try:
            ma.plan(ma.Call.of(q, q), CONFIG, target=target)
            said.append(f"# {number}: runs")
        except Unsupported as refused:
            said.append(f"# {number}\n{refused}")
    check_golden(f"refused/tokamax_versions_{device.split()[-1]}", "\n".join(said))


# ---- the fence -----------------------------------------------------------------------------------


FENCE = {"inline_mgpu_p", "inline_mgpu"}  # its name before jax 0.12 and since
BLOCKS = {"block_q_dkv": 64, "block_kv_dkv": 64, "block_q_dq": 64, "block_kv_dq": 64}


def primitives(kernels) -> list[str]:
    """Trace the backward, and list what its kernels do, in order."""
    x, rows = (
        jax.ShapeDtypeStruct((256, 2, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 256), jnp.float32),
    )
    run = partial(
        kernels.flash_attention_vjp_kernel,
        is_causal=False,
        logits_scale=1.0,
        logits_soft_cap=None,
        ds_dtype=None,
        config=kernels.Config(**BLOCKS),
    )
    traced = jax.make_jaxpr(lambda q, k, v, r, o, d: run(q, k, v, r, o, d, None, None, None, None))
    return [e.primitive.name for e in equations(traced(x, x, x, (rows, rows), x, x).jaxpr)]


def test_one_fence_before_places_are_free_again() -> None:
    """tokamax's kernel of dK and dV lacks it where it ends its reads; maxattn's copy has it."""
    if numbers(found := version("tokamax")) < numbers(TOKAMAX_ON_GPU):
        taken = f"maxattn takes it from {TOKAMAX_ON_GPU} on"
        pytest.skip(f"tokamax {found} has another backward for GPUs; {taken}")
    from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp_kernel_sm90 as theirs

    from maxattn.kernels.fused.tokamax_fence import backward_module

    ours = primitives(backward_module().sm90)
    assert not FENCE & set(primitives(theirs))
    (at,) = (i for i, name in enumerate(ours) if name in FENCE)
    assert ours[at + 1] == "barrier_arrive"
    assert "load" in ours[at - 6 : at]
    assert "barrier_arrive" not in ours[at - 6 : at]
