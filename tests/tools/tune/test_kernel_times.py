"""Timing kernels: which ones, which passes, and the results that survive a lost device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.config.measurements import is_sound
from maxattn.kernels import KERNELS
from maxattn.masks import KeyPadding
from maxattn.measuring.passes import backward, forward
from maxattn.measuring.timing import TimedFunction, compile_all
from maxattn.target import Target
from maxattn.tools.model_shapes import read
from maxattn.tools.tune import kernel_times
from maxattn.tools.tune.candidates import kernel_candidates
from maxattn.tools.tune.kernel_times import time_pass, time_programs, time_sizes
from tests.tools.tune.small import small_call

CONFIG, GROUPED = ma.AttentionConfig(), "2,96,64,4,8,2"


def test_the_passes_compute_what_attention_does():
    call, mask = small_call(GROUPED), KeyPadding(np.array([5, 64])).bind(96, 64, 2)
    kernel = KERNELS["memory_efficient"].build(
        call.derived(mask=mask.form()), CONFIG, Target.here()
    )
    (q, k, v, dout, arrays), *_ = kernel_times.random_sets(call, mask)
    out, lse = jax.jit(partial(forward, kernel))(q, k, v, dout, arrays)
    grads = backward(kernel, q, k, v, dout, arrays, out, lse)
    attend = lambda q, k, v: ma.attention(q, k, v, mask, role="cross")  # noqa: E731
    want, pull = jax.vjp(attend, q, k, v)
    for got, expected in zip((out, *grads), (want, *pull(dout)), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_arrays_of_masks_are_arguments_of_what_is_compiled():
    """As constants, lengths would be prepared at compile time, and that time would not count."""
    call, mask = small_call(GROUPED), KeyPadding(np.array([5, 64])).bind(96, 64, 2)
    kernel = KERNELS["memory_efficient"].build(call, CONFIG, Target.here())
    (inputs,) = kernel_times.random_sets(call, mask)
    jaxpr = jax.make_jaxpr(partial(forward, kernel))(*inputs)
    assert len(jaxpr.jaxpr.invars) == 5
    assert not any(np.array_equal(np.ravel(const), [5, 64]) for const in jaxpr.consts)


@pytest.mark.parametrize(("sets", "what"), [(1, "forward"), (3, "backward")])
def test_times_of_several_kernels(sets, what, monkeypatch):
    """Short calls on a GPU are chained in one program, and timed by the device's clock."""
    monkeypatch.setattr(kernel_times, "SECONDS", 0.01)
    monkeypatch.setattr(kernel_times, "inputs_of", lambda call: sets)
    monkeypatch.setattr("maxattn.measuring.timing.ENTRIES", 1 << 16)
    call = small_call(GROUPED)
    built = kernel_candidates(call, CONFIG, Target.here()).built
    times = time_pass(built, what, call, call.mask, "memory_efficient")
    assert times.ms.keys() == {"dot_product", "memory_efficient"} == built.keys()
    assert all(len(ms) == kernel_times.ROUNDS and min(ms) > 0 for ms in times.ms.values())
    assert times.failed == {} and not times.is_dead


def test_a_kernel_that_does_not_compile_says_why(monkeypatch):
    call = small_call(GROUPED)
    broken = lambda kernel, *_: 1 / 0 if kernel == "broken" else jnp.ones(3)  # noqa: E731
    monkeypatch.setattr(kernel_times, "forward", broken)
    found = time_pass({"a": "fine", "b": "broken"}, "forward", call, call.mask)
    assert list(found.ms) == ["a"]
    assert found.failed == {"b": "forward: ZeroDivisionError: division by zero"}


def test_a_lost_device_says_nothing_of_other_kernels(monkeypatch):
    """After the kernel that broke the device all others fail, but only that one is reported."""
    (fine,) = compile_all([TimedFunction(lambda: jnp.ones(3), lambda: [()])])
    stops = lambda sets: 1 / 0  # noqa: E731
    programs = {"a": fine, "b": replace(fine, compiled=stops), "c": replace(fine, compiled=stops)}
    programs |= {"d": replace(fine, compiled=None, failed="never")}
    assert kernel_times.answers()
    found = time_programs(programs, "forward", [()], 0.01)
    assert list(found.ms) == ["a"] and not found.is_dead
    assert found.failed["b"].startswith("forward: ZeroDivisionError")
    assert found.failed["d"] == "forward: never"
    monkeypatch.setattr(kernel_times, "answers", lambda: False)
    found = time_programs(programs, "forward", [()], 0.01)
    assert found.is_dead and not found.ms and list(found.failed) == ["b"]


@pytest.mark.parametrize("training", [True, False])
def test_sizes_are_timed_in_interpret_mode_too(training, monkeypatch):
    monkeypatch.setattr(kernel_times, "SECONDS", 0.01)
    call = small_call("1,128,128,1,64")
    kernel = KERNELS["flash"].build(
        call, ma.AttentionConfig(attention="flash"), Target.named("cpu")
    )
    assert time_sizes(kernel, call, training).seconds > 0


def test_short_calls_of_a_gpu_are_several_in_a_program(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    many = [
        kernel_times.inputs_of(read(s).call()) for s in ("1,64,64,2,64", "sdxl-64", "wan-14b-720p")
    ]
    assert many[0] == 4 and many[-1] == 1 and many == sorted(many, reverse=True)


# ---- the file ------------------------------------------------------------------------------------

SOUND = {
    "device_kind": "cpu",
    "versions": "jax 1",
    "call": "c",
    "settings": "",
    "data": "",
    "forward_ms": {"dot_product": [1.0, 2.0], "flash": [3.0]},
    "backward_ms": {},
    "failed": {"cudnn": "forward: no"},
}
NO_TIMES = 0, -1.0, True, "1", float("nan")
WRONG = [
    *({"forward_ms": wrong} for wrong in (None, [])),
    *({"forward_ms": {"a": wrong}} for wrong in (1.0, [], *([x] for x in NO_TIMES))),
    {"forward_ms": {"": [1.0]}},
    {"forward_ms": {str(i): [1.0] for i in range(100)}},
    {"backward_ms": {"a": [1.0] * 2000}},
    {"failed": []},
    {"failed": {"a": 1}},
    {"settings": None},
    {"data": 3},
    {"call": ["c"]},
    {"sizes": {}},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:40])
def test_a_damaged_measurement_of_kernels_is_ignored(wrong):
    assert is_sound(SOUND) and not is_sound(SOUND | wrong)


@pytest.mark.parametrize("missing", SOUND)
def test_a_measurement_of_kernels_says_everything(missing):
    assert not is_sound({key: value for key, value in SOUND.items() if key != missing})
