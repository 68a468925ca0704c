"""Plans for an H200 with measured kernels in its cache: choices, refusals and texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.auto.choose import order
from maxattn.tools.model_shapes import read
from maxattn.tools.tune import store
from maxattn.tuned.kernels import (
    CallTimes,
    is_as_fast,
    key_of_kernels,
    settings_of,
    times_of,
    versions_text,
)
from tests.golden_text import check_golden

PACKAGES = (("jax", "0.11.2"), ("fa4-jax", "0.1.0"), ("tokamax", "0.0.17"))
H200, BARE = (ma.Target("gpu", "NVIDIA H200", packages) for packages in (PACKAGES, PACKAGES[:1]))
CALL = read("64,256,256,16,72").call()
FORWARD = {"flash": 0.29, "cudnn": 0.312, "dot_product": 2.0}
BACKWARD = {"cudnn": 0.71, "flash": 0.75, "dot_product": 5.0}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAXATTN_CACHE", str(tmp_path))
    return tmp_path / "tuned.json"


def keep(
    cache: Path,
    forward: dict[str, float],
    backward: dict[str, float],
    call: ma.Call = CALL,
    **others: Any,
) -> ma.Target:
    """Write the file that `maxattn tune` writes on an H200; return a target that has read it."""
    times = ({name: [ms] * 5 for name, ms in its.items()} for its in (forward, backward))
    of = dict(zip(("forward_ms", "backward_ms"), times, strict=True))
    identity = {
        "device_kind": "NVIDIA H200",
        "versions": versions_text(PACKAGES),
        "call": key_of_kernels(call),
        "settings": "",
        "data": "",
        "failed": {},
    }
    store.add(cache, identity | of | others)
    return replace(H200, kernel_times=times_of("NVIDIA H200"))


def plan(target: ma.Target, call: ma.Call = CALL, **config: Any) -> ma.Plan:
    return ma.plan(call, ma.AttentionConfig(**config), target=target)


def said(made: ma.Plan, cache: Path) -> str:
    return str(made).replace(str(cache), "tuned.json")


def test_what_was_measured_comes_first(cache):
    target = keep(cache, FORWARD, BACKWARD)
    made = plan(target)
    assert made.kernel.name == "flash/cudnn" != plan(H200).kernel.name
    check_golden("gpu/tuned_kernels", said(made, cache))
    with target.assumed():
        assert ma.plan(CALL).kernel.name == "flash/cudnn"


def test_a_measured_float32_call_is_not_warned_of(cache):
    wide, times = replace(CALL, dtype="float32"), {"dot_product": 1.0}
    assert plan(H200, wide).warns and not plan(keep(cache, times, times, wide), wide).warns


def test_another_device_call_or_settings_is_not_measured(cache):
    target = keep(cache, {"dot_product": 0.1, "cudnn": 1.0}, {"dot_product": 0.1, "cudnn": 1.0})
    assert plan(target).kernel.name == "dot_product"
    others = [
        replace(CALL, batch=32),
        replace(CALL, dtype="float16"),
        replace(CALL, kv_heads=8),
        replace(CALL, mask=M.Causal().bind(256, 256)),
        replace(CALL, mask=M.KeyPadding(np.ones(64, np.int32)).bind(256, 256)),
    ]
    for other in others:
        assert plan(target, other).kernel == plan(H200, other).kernel
    assert plan(target, split_head_dim=False).kernel.name != "dot_product"
    assert times_of("NVIDIA H100 80GB HBM3") == ()
    same = replace(CALL, role="cross", scale=0.5)
    assert plan(target, same).kernel.name == "dot_product"
    biased = replace(CALL, bias=(1, 1, 256, 256))
    assert "maxattn tune" not in plan(target, biased).because


def test_a_kernel_that_cannot_run_any_more_is_refused_and_the_next_runs(cache):
    forward = {"cudnn_flash_te": 0.2, "tokamax_flash": 0.25, "cudnn": 0.4, "flash": 0.5}
    keep(cache, forward, forward)
    made = plan(replace(BARE, kernel_times=times_of("NVIDIA H200")))
    assert made.kernel.name == "cudnn" and not made.fell_back
    check_golden("gpu/tuned_kernels_refused", said(made, cache))


def test_flash_that_is_gone_is_not_cudnn_by_its_name(cache):
    keep(cache, {"flash": 0.2, "dot_product": 0.3, "cudnn": 0.4}, {})
    made = plan(replace(BARE, kernel_times=times_of("NVIDIA H200")))
    assert made.kernel.name.split("/")[0] == "dot_product"
    assert any(note.startswith("flash was measured to be faster: pip") for note in made.notes)


def test_a_failed_kernel_is_kept_out_even_where_nothing_was_measured(cache):
    first = next(order(CALL, H200))[0].split("/")[0]
    target = keep(cache, {}, {}, failed={first: "forward: XlaRuntimeError: illegal address"})
    made = plan(target)
    assert first not in made.kernel.name.split("/") and made.refused[-1].who == first
    assert [str(r) for r in made.refused if "illegal address" in str(r)]
    # Where nothing else can run a call, plain JAX is tried again.
    call = replace(CALL, dtype="float32")
    failed = {"dot_product": "forward: out of memory", "memory_efficient": "backward: the same"}
    target = keep(cache, {}, {}, call, failed=failed)
    assert plan(target, call).kernel.name in failed


def test_deterministic_looks_at_what_was_measured(cache):
    target = keep(cache, FORWARD, {"flash": 0.5, "cudnn": 0.71, "dot_product": 5.0})
    assert plan(target).kernel.name == "flash"
    made = plan(target, deterministic=True)
    assert made.kernel.name.split("/")[-1] not in ("flash", "cudnn")
    assert "measured here" in made.because and {r.who for r in made.refused} >= {"flash", "cudnn"}


def test_a_tie_keeps_what_auto_takes_without_it(cache):
    own = plan(H200).kernel.name.split("/")[0]
    other = next(n for n in ("cudnn", "flash") if n != own)
    for rounds, wins in (([1.02, 0.98, 1.02, 0.98, 1.02], own), ([1.02] * 5, other)):
        keep(cache, {}, {}, forward_ms={own: rounds, other: [1.0] * 5}, data=str(rounds))
        target = replace(H200, kernel_times=times_of("NVIDIA H200"))
        made = plan(target)
        assert made.kernel.name.split("/")[0] == wins
        assert ("no faster than the noise" in made.because) == (wins == own)


def test_rounds_decide_between_two_kernels():
    slow, fast = (1.1,) * 5, (1.0,) * 5
    assert not is_as_fast(slow, fast) and is_as_fast(fast, fast) and is_as_fast((1.005,) * 5, fast)
    assert not is_as_fast((1.1, 1.1, 1.1, 1.1, 0.9), fast)  # one round of five is chance
    assert is_as_fast((1.1, 1.1, 1.1, 0.9, 0.9), fast)
    assert not is_as_fast((1.1,) * 3, fast)


def test_other_versions_count_and_are_said(cache):
    keep(cache, FORWARD, BACKWARD)
    newer = replace(
        H200, packages=(("jax", "0.12.0"), *PACKAGES[1:]), kernel_times=times_of(H200.device_kind)
    )
    made = plan(newer)
    assert made.kernel.name == "flash/cudnn"
    check_golden("gpu/tuned_kernels_versions", made.notes[-1])
    swapped = {"flash": 9.0, "cudnn": 0.1}
    keep(cache, swapped, swapped, versions=versions_text(newer.packages))
    both = times_of(H200.device_kind)
    assert plan(replace(newer, kernel_times=both)).kernel.name == "cudnn"
    assert plan(replace(H200, kernel_times=both)).kernel.name == "flash/cudnn"
    assert "run maxattn tune again" not in str(plan(replace(newer, kernel_times=both)))


def test_the_share_of_one_device_is_the_call(cache):
    whole = replace(CALL, batch=128, heads=32, kv_heads=32)
    target = keep(cache, FORWARD, BACKWARD)
    made = ma.plan(whole, ma.AttentionConfig(), {"data": 2, "tensor": 2}, target)
    assert made.kernel.name == "flash/cudnn"
    ring = ma.AttentionConfig(attention="ring")
    long = replace(CALL, q_len=1024, kv_len=1024)
    made = ma.plan(long, ring, {"context": 4}, target)
    assert made.kernel.name == "flash/cudnn" and made.strategy.name == "ring"
    causal = replace(long, mask=M.Causal().bind(1024, 1024))
    local = replace(CALL, mask=M.Causal().bind(256, 256))
    target = keep(cache, FORWARD, BACKWARD, local)
    assert "measured here" not in ma.plan(causal, ring, {"context": 4}, target).because


def test_masks_of_arrays_are_one_call_by_shape():
    def key(mask: ma.masks.Mask, tokens: int = 256, batch: int = 2) -> str:
        bound = mask.bind(tokens, tokens, batch)
        call = replace(CALL, batch=batch, q_len=tokens, kv_len=tokens, mask=bound)
        return key_of_kernels(call)

    of_32, of_64 = (M.KeyPadding(np.array([5, 9], t)) for t in (np.int32, np.int64))
    assert key(of_32) == key(of_64) != key(M.KeyPadding(np.ones((2, 256), bool)))
    assert key(of_32 & M.Causal()) != key(of_32)
    ids = np.zeros((2, 256), np.int32)
    assert key(M.Segments(ids, ids)) != key(M.Segments.of_lengths((100, 156)))
    # Long lists of lengths are told apart.
    one, other = (
        key(M.Segments.of_lengths((*range(1, 40), 500 - last, last)), 1280) for last in (10, 11)
    )
    assert one.split(" ")[:-1] == other.split(" ")[:-1] and one != other


def test_settings_that_no_kernel_reads_do_not_count():
    config = ma.AttentionConfig(attention="auto", deterministic=True, remat_policy="FULL")
    assert settings_of(config) == ""
    assert settings_of(config.replace(query_chunk_size=9)) == "query_chunk_size 9"
    times = CallTimes("c", "", PACKAGES, (("flash", (1.0,)),))
    assert hash(replace(H200, kernel_times=(times,))) and times.backward == ()
