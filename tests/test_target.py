"""Targets: this machine, a named one, and one that is assumed while tracing."""

from __future__ import annotations

import threading

import jax
import pytest

import maxattn as ma
from maxattn.target import Target


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
