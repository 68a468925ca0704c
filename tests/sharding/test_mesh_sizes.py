"""Meshes of absurd sizes are refused before any loop over their devices."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import maxattn as ma
from maxattn.errors import MaxattnError, MeshError
from maxattn.sharding.mesh import MOST_DEVICES, MOST_RANKS
from tests.lines_run import lines_run

V5P = ma.Target.named("TPU v5p")
STRATEGIES = ("auto", "ring", "ulysses", "ulysses_ring", "all_gather")


def call(heads: int = 12) -> ma.Call:
    return ma.Call.of(*[jax.ShapeDtypeStruct((1, 4096, heads, 128), "bfloat16")] * 2)


SIZES: dict[str, Any] = {
    "huge": {"context": 10**30},
    "unwritable": {"context": 10**5000},
    "below_zero_and_unwritable": {"tensor": -(10**5000)},
    "huge_product": {"data": 2**14, "fsdp": 2**14, "context": 2**9, "tensor": 2},
    "huge_data": {"data": MOST_DEVICES + 1},
    "ranks": {"context": MOST_RANKS + 1},
    "zero": {"fsdp": 0},
    "negative": {"context": -4},
    "boolean": {"context": True},
    "text": {"context": "4"},
    "float": {"context": 4.0},
    "none": {"context": None},
    "numpy_boolean": {"context": np.True_},
    "not_a_number": {"data": float("nan")},
    "an_abstract_mesh": AbstractMesh((10**9,), ("context",)),
    "an_abstract_product": AbstractMesh((10**6, 10**6), ("data", "tensor")),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SIZES)
def test_a_mesh_of_no_machine_is_refused(name: str, strategy: str) -> None:
    config = ma.AttentionConfig(context_parallel=strategy)
    with pytest.raises(MeshError) as error:
        ma.plan(call(), config, SIZES[name], V5P)
    assert len(str(error.value)) < 500 and "mesh" in str(error.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_large_meshes_and_settings_take_bounded_work(strategy: str) -> None:
    """Loops run over divisors, not over all numbers up to a setting, a head count or a mesh."""
    for mesh in ({"context": 509}, {"context": 512}, {"data": 2**12, "tensor": 2**4}):
        for heads, chunks in ((12, 10**9), (2**20 * 3, 10**9), (999_983, 2)):
            settings = {"ulysses_attention_chunks": chunks, "fallback": "allow"}
            config = ma.AttentionConfig(context_parallel=strategy, **settings)
            shape = jax.ShapeDtypeStruct((2**12, 8192, heads, 128), "bfloat16")
            with suppress(MaxattnError):
                asked = ma.Call.of(shape, shape), config, mesh, V5P
                lines_run(partial(ma.plan, *asked), most=100_000)


def test_shards_of_a_huge_axis_are_refused_at_once() -> None:
    with pytest.raises(MaxattnError):
        ma.AttentionConfig(
            context_parallel="ulysses_ring", ulysses_shards=7, ici_context_parallelism=10**15
        )


def test_any_whole_number_is_a_size() -> None:
    plans = [ma.plan(call(8), mesh={"context": n}, target=V5P) for n in (4, 2)]
    assert [p.mesh for p in plans] == [(("context", 4),), (("context", 2),)]
