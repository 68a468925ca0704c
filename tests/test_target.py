"""Targets: this machine, a named one, and one that is assumed while tracing."""

from __future__ import annotations

import threading

import jax
import pytest

import maxattn as ma
from maxattn.block_sizes.chips import CHIPS
from maxattn.block_sizes.recommend import SHARED_MEMORY
from maxattn.devices import MACHINES, machine_of
from maxattn.target import GIB, HBM, KNOWN, PEAK, Target, known_kind
from tests.block_sizes.compiler import TOPOLOGIES


def test_an_assumed_target_is_what_is_here():
    here, tpu, gpu = Target.here(), Target.named("TPU v5p"), Target.named("NVIDIA H200")
    with tpu.assumed():
        assert Target.here() is tpu
        with gpu.assumed():
            assert Target.here() is gpu
        assert Target.here() is tpu
    assert Target.here() == here


def test_it_ends_with_an_error_and_stays_in_its_thread():
    here, seen = Target.here(), []
    with pytest.raises(ZeroDivisionError), Target.named("TPU v5p").assumed():
        other = threading.Thread(target=lambda: seen.append(Target.here()))
        other.start()
        other.join()
        raise ZeroDivisionError
    assert [*seen, Target.here()] == [here, here]


def test_attention_is_traced_for_it():
    q = jax.ShapeDtypeStruct((1, 256, 2, 128), "bfloat16")
    config = ma.AttentionConfig(attention="flash")
    with Target.named("TPU v5p").assumed():
        traced = jax.jit(lambda q: ma.attention(q, q, q, config=config)).trace(q)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_every_table_of_devices_has_every_device():
    def kinds(platform: str) -> set[str]:
        return {kind for kind, its in KNOWN.items() if its == platform}

    assert set(MACHINES) == set(KNOWN)
    assert set(HBM) == set(PEAK) == kinds("tpu") | kinds("gpu")
    assert set(CHIPS) == set(TOPOLOGIES) == kinds("tpu")
    assert set(SHARED_MEMORY) == kinds("gpu")


def test_figures_are_of_what_jax_calls_a_device():
    """Of a v7x that is half a chip, whose maker gives 2307e12 FLOP/s, 192 GB and 7.4 TB/s."""
    one = machine_of(Target.named("TPU v7x"))
    assert PEAK["TPU v7x"] == pytest.approx(2307e12 / 2, rel=1e-3)
    assert one.hbm == pytest.approx(7.4e12 / 2, rel=1e-2)
    assert HBM["TPU v7x"] < 192 * GIB / 2


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("TPU7x", "TPU v7x"),
        ("TPU v5 lite", "TPU v5e"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA L40", None),
    ],
)
def test_jax_s_names_of_devices_are_known(spelling: str, name: str | None):
    assert known_kind(spelling) == name
