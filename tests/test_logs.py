"""What `attention()` logs: each plan once, a mesh that is asked for and not there, a fallback."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import maxattn as ma
from maxattn import masks as M
from maxattn.announce import announce
from tests.golden_text import check_golden
from tests.test_attention import qkv


def test_each_distinct_plan_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv(t=23)
    with caplog.at_level(logging.INFO, logger="maxattn"):
        for _ in range(3):
            ma.attention(q, k, v)
        ma.attention(q, k, v, mask=M.Causal())
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]
    assert "T=S=23" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("settings", "sizes", "golden"),
    [
        ({"ici_context_parallelism": 8}, None, "no_mesh"),
        ({"ici_context_parallelism": 2, "ici_fsdp_parallelism": 2}, {"context": 4}, "other_mesh"),
        ({"ici_data_parallelism": 4}, None, "no_mesh_for_the_batch"),
        ({"ici_data_parallelism": -1}, None, None),
        ({"ici_context_parallelism": 4}, {"context": 4}, None),
        ({}, {"context": 4}, None),
    ],
)
def test_a_mesh_that_is_not_there_is_said(
    settings: dict,
    sizes: dict | None,
    golden: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["maxattn.announce"], "_said", set())
    mesh = (
        ma.AttentionConfig(ici_context_parallelism=4).make_mesh(jax.devices()[:4])
        if sizes
        else None
    )
    q, k, v = qkv(t=24)
    with caplog.at_level(logging.WARNING, logger="maxattn"):
        for _ in range(2):
            ma.attention(q, k, v, config=ma.AttentionConfig(**settings), mesh=mesh)
    said = [r.getMessage() for r in caplog.records if "The config asks for" in r.getMessage()]
    assert len(said) == (golden is not None)
    if golden:
        check_golden(f"logs/{golden}", said[0])


def _no_mesh(config: ma.AttentionConfig) -> None:
    ma.attention(*qkv(t=24), config=config)


def _batch_alone(config: ma.AttentionConfig) -> None:
    ma.attention(*qkv(t=24, batch=4), config=config, mesh=config.make_mesh(jax.devices()[:4]))


def _other_names(config: ma.AttentionConfig) -> None:
    with jax.set_mesh(
        jax.make_mesh((2, 2), ("dp", "sp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    ):
        ma.attention(*qkv(t=24), config=config)


def _manual(config: ma.AttentionConfig) -> None:
    mesh = jax.make_mesh((4,), ("context",), (AxisType.Auto,), devices=jax.devices()[:4])
    tokens = PartitionSpec(None, "context")
    jax.shard_map(
        partial(ma.attention, config=config), mesh=mesh, in_specs=tokens, out_specs=tokens
    )(*qkv(t=24))


@pytest.mark.parametrize(
    ("call", "settings", "golden"),
    [
        (_no_mesh, {"attention": "ring"}, "ring_without_mesh"),
        (_no_mesh, {"cross_attention": "dot_product"}, None),
        (_batch_alone, {"attention": "ring"}, "ring_over_no_context"),
        (_batch_alone, {"attention": "dot_product"}, None),
        (_other_names, {"attention": "ulysses"}, "mesh_of_other_names"),
        (_other_names, {"ici_context_parallelism": 8}, "mesh_of_other_names_and_sizes"),
        (_other_names, {}, None),
        (_manual, {"context_parallel": "ulysses"}, "context_axis_manual"),
        (_manual, {"ici_context_parallelism": 4}, "context_axis_manual_and_sizes"),
        (_manual, {}, None),
    ],
)
def test_what_is_not_spread_is_said(
    call: Any, settings: dict, golden: str | None, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A text is said once a process, and another test may have met it.
    monkeypatch.setattr(sys.modules["maxattn.announce"], "_said", set())
    with caplog.at_level(logging.WARNING, logger="maxattn"):
        for _ in range(2):
            call(ma.AttentionConfig(**settings))
    said = [r.getMessage() for r in caplog.records if "The config asks for" in r.getMessage()]
    assert len(said) == (golden is not None)
    if golden:
        check_golden(f"logs/{golden}", said[0])


@pytest.mark.parametrize(
    ("fallback", "level"), [("warn", logging.WARNING), ("allow", logging.INFO)]
)
def test_a_fallback_is_never_silent(
    fallback: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = ma.AttentionConfig(attention="cudnn_flash_te", fallback=fallback)
    x = jax.ShapeDtypeStruct((1, 24, 4, 16), jnp.float32)
    plan = ma.plan(ma.Call.of(x, x), config, target=ma.Target.named("cpu"))
    with caplog.at_level(logging.INFO, logger="maxattn"):
        announce(plan)
    assert plan.fell_back
    assert plan.kernel.name == "dot_product"
    assert [r.levelno for r in caplog.records] == [level]
    assert "cudnn_flash_te: it needs an NVIDIA GPU" in caplog.text
