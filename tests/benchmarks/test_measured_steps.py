"""Counted operations and measured times of steps, at sizes that can be counted by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import measure
import pytest
from maxattn_examples.flux.settings import Sizes as FluxSizes
from maxattn_examples.sdxl.settings import Sizes as UNetSizes
from maxattn_examples.train.progress import Work, count
from maxattn_examples.wan.settings import Sizes
from model_steps import clock, steps, workloads

import maxattn as ma
from tests.fixtures import make_diffusers as made
from tests.waiting import but

CONFIG = ma.AttentionConfig(
    attention="dot_product", cross_attention="dot_product", remat_policy="SAVE_ATTENTION"
)


def wan() -> workloads.Workload:
    return workloads.wan(CONFIG, 2, 32, 48, 5, Sizes(**made.MODEL), text=7)


def sdxl() -> workloads.Workload:
    return workloads.sdxl(CONFIG, 2, 64, 96, UNetSizes(**made.UNET), text=5)


def flux() -> workloads.Workload:
    return workloads.flux(CONFIG, 2, 32, 48, FluxSizes(**made.FLUX), text=5)


@pytest.mark.slow
def test_operations_of_flux() -> None:
    work = flux()
    step = steps.denoising(work, jnp.float32)
    count = step.operations()
    tokens, text, width = 2 * 3, 5, 16
    both = tokens + text
    assert work.tokens == 2 * tokens
    assert count.attention == 2 * (2 + 2) * 4 * both * both * width
    # A token of a double block: four projections and a feed-forward layer of four widths; of a
    # single block three, the layer, and five widths out.
    blocks = both * width * width * (2 * (4 + 8) + 2 * (3 + 4 + 5))
    around = tokens * 2 * 16 * width + text * 6 * width
    said = 2 * 256 * width + 5 * width + 3 * width * width  # time, guidance and pooled text
    modulation = width * width * (2 * 12 + 2 * 3 + 2)
    assert count.matmul == 2 * 2 * (blocks + around + said + modulation)


def test_operations_of_wan() -> None:
    work = wan()
    step = steps.denoising(work, jnp.float32)
    count = step.operations()
    tokens, width, layers = 2 * 2 * 3, 24, 2
    assert work.tokens == 2 * tokens
    assert count.attention == layers * 2 * 4 * tokens * width * (tokens + 7)
    # Self-attention's four projections, two of cross-attention (its keys and values are there), two
    # of the ffn.
    inner = layers * (6 * width * width + 2 * width * 32)
    around = 4 * 4 * width * 2  # patches in and out: four latents of four channels
    time = 16 * width + width * width + 6 * width * width
    assert count.matmul == 2 * (2 * tokens * (inner + around) + 2 * time)
    assert count.total(training=True) == 3.5 * count.attention + 3 * count.matmul


@pytest.mark.slow
@pytest.mark.parametrize("make", but([wan, sdxl, flux], [wan]))
@pytest.mark.parametrize("kind", but([steps.denoising, steps.training], [steps.training]))
def test_a_step_runs_and_changes_what_it_carries(make, kind) -> None:
    step = kind(make(), jnp.float32)
    carry, fixed = step.start()
    before = jax.tree.map(jnp.copy, carry)
    after = step.run(carry, fixed)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(after))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a != b).any()), before, after))


@pytest.mark.slow
def test_a_profile_is_sorted_into_kinds(tmp_path: Path) -> None:
    found = clock.measure(steps.denoising(wan(), jnp.float32), rounds=2, steps=2, profile=tmp_path)
    assert len(found.ms) == 2 and found.median > 0
    kinds = found.by_kind()
    total = sum(k.ms for k in found.kernels)
    assert kinds["matmul"] > 0 and sum(kinds.values()) == pytest.approx(total)
    assert kinds["attention"] > 0, "dense attention is matrix products inside of ours"


KERNELS = [
    ("flash_fwd_sm90", "attention"),
    ("kernel_cutlass_kernel_maxattnkernelsfa4_partsparts_classlocalsInParts", "attention"),
    ("nvjet_tst_128 jit(step)/jit(_run)/dot_general", "attention"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matmul"),
    ("loop_convert_fusion", "rest"),
    ("kernel_cutlass_kernel_maxattnmodulesnorm_ropecute", "rest"),
]


@pytest.mark.parametrize(("names", "kind"), KERNELS)
def test_a_kernel_is_known_by_its_names(names: str, kind: str) -> None:
    assert clock.kind_of(*names.split()) == kind


def test_a_device_idles_between_kernels_of_all_its_lines():
    spans = [(60.0, 70.0), (0.0, 10.0), (5.0, 30.0), (20.0, 25.0), (45.0, 60.0)]
    events = [clock.Event("k", "k", *span) for span in spans]
    assert clock.idle_ns(events) == 15.0
    assert clock.idle_ns([]) == 0.0


def test_the_command_finds_its_models_from_any_folder(tmp_path: Path) -> None:
    words = [sys.executable, measure.__file__, "flux", "stream"]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1 and "only Wan makes a video block by block" in run.stderr


@pytest.mark.slow
def test_the_command_reports_a_step(monkeypatch, capsys, tmp_path: Path) -> None:
    small, file = wan(), tmp_path / "f.json"
    monkeypatch.setattr(workloads, "wan", lambda *a, **how: small)
    words = ["wan", "train", "--rounds", "1", "--steps", "1", "--json", str(file)]
    measure.main(measure.parser().parse_args(words))
    out = capsys.readouterr().out
    assert "tokens/s" in out and "GiB" in out and "TFLOP" in out
    assert file.read_text().count('"ms"') == 1


def test_attention_is_counted_by_the_channels_of_its_values():
    q = jax.ShapeDtypeStruct((2, 5, 4, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((2, 7, 4, 8), jnp.float32)
    v = jax.ShapeDtypeStruct((2, 7, 4, 6), jnp.float32)
    work = count(lambda *each: ma.attention(*each), q, k, v)
    assert work == Work(attention=2 * 2 * 4 * 5 * 7 * (8 + 6))
