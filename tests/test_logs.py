"""Log lines of `attention()`: each plan once, a missing mesh, a fallback."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import maxattn as ma
from maxattn import masks as M
from maxattn.announce import announce
from tests.golden_text import check_golden
from tests.streaming.stack import skipped
from tests.test_attention import qkv


def test_each_distinct_plan_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv(t=23)
    with caplog.at_level(logging.INFO, logger="maxattn"):
        for _ in range(3):
            ma.attention(q, k, v)
        ma.attention(q, k, v, mask=M.Causal())
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]
    assert "T=S=23" in caplog.records[0].getMessage()


def test_heads_before_tokens_are_logged_once(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["maxattn.announce"], "_logged", set())
    torchs, ours = jnp.ones((2, 4, 96, 8)), jnp.ones((2, 96, 4, 8))
    with caplog.at_level(logging.WARNING, logger="maxattn"):
        for x in (ours, torchs, torchs, jnp.ones((1, 1, 40, 8))):
            ma.attention(x, x, x)
    (record,) = caplog.records
    check_golden("logs/heads_before_tokens", record.getMessage())


def _no_mesh(config: ma.AttentionConfig) -> None:
    ma.attention(*qkv(t=24), config=config)


def _context(config: ma.AttentionConfig) -> None:
    mesh = ma.AttentionConfig(ici_context_parallelism=4).make_mesh(jax.devices()[:4])
    ma.attention(*qkv(t=24), config=config, mesh=mesh)


def _batch_alone(config: ma.AttentionConfig) -> None:
    ma.attention(*qkv(t=24, batch=4), config=config, mesh=config.make_mesh(jax.devices()[:4]))


def _other_names(config: ma.AttentionConfig) -> None:
    names, axis_types = ("dp", "sp"), (AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh((2, 2), names, axis_types, devices=jax.devices()[:4])):
        ma.attention(*qkv(t=24), config=config)


def _manual(config: ma.AttentionConfig) -> None:
    mesh = jax.make_mesh((4,), ("context",), (AxisType.Auto,), devices=jax.devices()[:4])
    tokens, attend = PartitionSpec(None, "context"), partial(ma.attention, config=config)
    jax.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens)(*qkv(t=24))


def _none_wanted(config: ma.AttentionConfig) -> None:
    ma.attention(*qkv(t=24), config=config, mesh=False)


def _stream(config: ma.AttentionConfig) -> None:
    """Trace two blocks of a stream; the second one attends inside the library's own shard_map."""
    mesh = config.make_mesh(jax.devices()[:4])
    attn = ma.FlaxAttention(16, heads=4, dim_head=4, config=config, mesh=mesh, rngs=nnx.Rngs(0))
    sizes = {"layers": 1, "batch": 1, "kv_heads": 4, "dim_head": 4, "dtype": "float32"}
    cache = ma.Stream(tokens_per_frame=2, window=2).cache(**sizes, mesh=mesh)
    for each in (cache, skipped(cache)):  # a plan is logged when it is traced
        jax.eval_shape(lambda x, kept: attn(x, cache=kept.layer(0)), jnp.ones((1, 2, 16)), each)


# What a call logs of a mesh that its config asks for and that is not there: a golden text, or None.
NOT_THERE = [
    (_no_mesh, {"ici_context_parallelism": 8}, "no_mesh"),
    (_context, {"ici_context_parallelism": 2, "ici_fsdp_parallelism": 2}, "other_mesh"),
    (_no_mesh, {"ici_data_parallelism": 4}, "no_mesh_for_the_batch"),
    (_no_mesh, {"ici_data_parallelism": -1}, None),
    (_context, {"ici_context_parallelism": 4}, None),
    (_context, {}, None),
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
    (_none_wanted, {"attention": "ring", "ici_context_parallelism": 4}, None),
    (_stream, {"ici_context_parallelism": 4}, None),
    (
        _stream,
        {"attention": "ring", "ici_context_parallelism": 2, "ici_tensor_parallelism": 2},
        None,
    ),
]


@pytest.mark.parametrize(("call", "settings", "golden"), NOT_THERE)
def test_a_mesh_that_is_not_there_is_logged_once(
    call: Any, settings: dict, golden: str | None, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A text is logged once a process, and another test may have met it.
    monkeypatch.setattr(sys.modules["maxattn.announce"], "_logged", set())
    with caplog.at_level(logging.WARNING, logger="maxattn"):
        for _ in range(2):
            call(ma.AttentionConfig(**settings))
    texts = [r.getMessage() for r in caplog.records if "The config asks for" in r.getMessage()]
    assert len(texts) == (golden is not None)
    if golden:
        check_golden(f"logs/{golden}", texts[0])


@pytest.mark.parametrize(
    ("fallback", "level"), [("warn", logging.WARNING), ("allow", logging.INFO)]
)
def test_a_fallback_is_never_silent(fallback: str, level: int, caplog: pytest.LogCaptureFixture):
    config = ma.AttentionConfig(attention="cudnn_flash_te", fallback=fallback)
    x = jax.ShapeDtypeStruct((1, 24, 4, 16), jnp.float32)
    plan = ma.plan(ma.Call.of(x, x), config, target=ma.Target.named("cpu"))
    with caplog.at_level(logging.INFO, logger="maxattn"):
        announce(plan)
    assert plan.fell_back
    assert plan.kernel.name == "dot_product"
    assert [r.levelno for r in caplog.records] == [level]
    assert "cudnn_flash_te: it needs an NVIDIA GPU" in caplog.text


def test_auto_warns_if_an_untested_version_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    target = ma.Target.named("NVIDIA H100", (("fa4-jax", "9.9"),))
    plan = ma.plan(ma.Call(1, 4096, 4096, 8, 8, 64, "bfloat16"), target=target)
    with caplog.at_level(logging.WARNING, logger="maxattn"):
        announce(plan)
    assert plan.kernel.name == "cudnn"
    assert "fa4-jax and was tested with >=0.1,<0.2, not with 9.9" in caplog.text
