"""Which kernels are timed, what is timed of them, and what is kept of a device that is lost."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import maxattn as ma
from maxattn import tuned
from maxattn.config.measurements import is_sound
from maxattn.kernels import KERNELS
from maxattn.masks import KeyPadding, Segments
from maxattn.target import Target
from maxattn.tools.bench.grid import kernel_passes
from maxattn.tools.bench.timing import Timed
from maxattn.tools.model_shapes import changed, read
from maxattn.tools.tune import kernel_times
from maxattn.tools.tune.kernel_candidates import kernel_candidates
from maxattn.tools.tune.kernel_times import sorted_out, time_backward, time_forward
from tests.golden_text import check_golden

CONFIG = ma.AttentionConfig()
EXTRAS = (("fa4-jax", "0.1.0"), ("tokamax", "0.0.17"), ("transformer-engine-jax", "2.20.2"))


def small(text: str = "2,96,64,4,8,2") -> ma.Call:
    return changed(read(text), None, "f32", None, None).call()


@pytest.mark.parametrize("name", ["dot_product", "memory_efficient"])
def test_the_passes_compute_what_attention_does(name):
    call, mask = small(), KeyPadding(np.array([5, 64])).bind(96, 64, 2)
    kernel = KERNELS[name].build(call.derived(mask=mask.form()), CONFIG, Target.here())
    (q, k, v, dout, arrays), *_ = kernel_times._inputs(call, mask)
    out, lse = jax.jit(partial(kernel_passes.forward, kernel))(q, k, v, dout, arrays)
    grads = kernel_passes.backward(kernel, q, k, v, dout, arrays, out, lse)
    attend = lambda q, k, v: ma.attention(q, k, v, mask, role="cross")  # noqa: E731
    want, pull = jax.vjp(attend, q, k, v)
    for got, expected in zip((out, *grads), (want, *pull(dout)), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_arrays_of_masks_are_arguments_of_what_is_compiled():
    """Else the compiler would prepare lengths once, and nobody would pay for it."""
    call, mask = small(), KeyPadding(np.array([5, 64])).bind(96, 64, 2)
    kernel = KERNELS["memory_efficient"].build(call, CONFIG, Target.here())
    (inputs,) = kernel_times._inputs(call, mask)
    jaxpr = jax.make_jaxpr(partial(kernel_passes.forward, kernel))(*inputs)
    assert len(jaxpr.jaxpr.invars) == 5
    assert not any(np.array_equal(np.ravel(const), [5, 64]) for const in jaxpr.consts)


def test_times_of_several_kernels(monkeypatch):
    monkeypatch.setattr(kernel_times, "SECONDS", 0.01)
    call = small()
    built = kernel_candidates(call, CONFIG, Target.here()).built
    forward = time_forward(built, call, call.mask)
    backward = time_backward(built, call, call.mask, "memory_efficient")
    for times in (forward.forward, backward.backward):
        assert times.keys() == {"dot_product", "memory_efficient"}
        assert all(len(ms) == 5 and min(ms) > 0 for ms in times.values())
    assert forward.failed == backward.failed == {} and not forward.is_dead


def test_short_calls_are_timed_behind_passes_over_memory(monkeypatch):
    """As on a GPU: by the device's clock, from the last pass on."""
    monkeypatch.setattr(kernel_times, "inputs_of", lambda call: 3)
    monkeypatch.setattr("maxattn.tools.bench.grid.busy.ENTRIES", 1 << 16)
    call = small()
    built = kernel_candidates(call, CONFIG, Target.here()).built
    forward = time_forward(built, call, call.mask)
    backward = time_backward(built, call, call.mask, "dot_product")
    assert forward.failed == backward.failed == {}
    assert forward.forward.keys() == backward.backward.keys() == built.keys()
    rounds = [*forward.forward.values(), *backward.backward.values()]
    assert all(len(ms) == kernel_times.ROUNDS and min(ms) > 0 for ms in rounds)
    failing = kernel_times._behind({"x": lambda *_: 1 / 0}, kernel_times._inputs(call, call.mask))
    assert [each.failed for each in failing] == ["ZeroDivisionError: division by zero"]


def test_a_kernel_that_the_passes_hide_has_no_time(monkeypatch):
    """NaN is neither a time nor fastest."""
    hidden = lambda jobs, rounds: [(float("nan"),) * rounds, (1e-3,) * rounds]  # noqa: E731
    monkeypatch.setattr(kernel_times, "seconds_behind", hidden)
    monkeypatch.setattr(kernel_times, "inputs_of", lambda call: 3)
    call = small()
    built = kernel_candidates(call, CONFIG, Target.here()).built
    found = time_forward(built, call, call.mask)
    first, second = built
    assert list(found.forward) == [second]
    too_short = "forward: it is too short to be told from the passes before it"
    assert found.failed == {first: too_short}


def test_what_is_timed_on_an_h200():
    said = []
    for text, extras in (
        ("64,256,256,16,72", EXTRAS),
        ("wan-1.3b-480p", EXTRAS[:1]),
        ("wan-cross", ()),
        ("sdxl-64", EXTRAS),
    ):
        call = read(text).call()
        found = kernel_candidates(call, CONFIG, Target.named("NVIDIA H200", extras))
        left_out = [f"\n  {name}: {why}" for name, why in found.left_out.items()]
        said.append(f"{text}: {', '.join(found.built)}{''.join(left_out)}")
    check_golden("cli/tune/kernels_that_are_timed", "\n".join(said))


def test_a_lost_device_says_nothing_of_the_kernels_after_the_one_that_broke_it():
    timed = {"a": Timed(1.0, rounds=(1.0,)), "b": Timed(failed="x"), "c": Timed(failed="x")}
    failed = {name: f"forward: {each.failed}" for name, each in timed.items() if each.failed}
    assert sorted_out(timed, failed, True) == ({"a": (1000.0,)}, failed, False)
    assert sorted_out(timed, failed, False) == ({}, {"b": "forward: x"}, True)
    assert kernel_times.answers()


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
WRONG = [
    {"forward_ms": None},
    {"forward_ms": []},
    {"forward_ms": {"a": 1.0}},
    {"forward_ms": {"a": []}},
    {"forward_ms": {"a": [0]}},
    {"forward_ms": {"a": [-1.0]}},
    {"forward_ms": {"a": [True]}},
    {"forward_ms": {"a": ["1"]}},
    {"forward_ms": {"a": [float("nan")]}},
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["dot_product", "flash", "", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*SOUND]), JSON, max_size=3))
def test_whatever_is_said_of_kernels_a_plan_is_made(changes):
    import json

    from maxattn.tuned.kernels import key_of_kernels, versions_text

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(tuned.VARIABLE, folder)
        call, here = small("1,30,30,2,8"), Target.here()
        facts = {"versions": versions_text(here.packages), "call": key_of_kernels(call)}
        text = json.dumps({"version": 1, "measurements": [SOUND | facts | changes]})
        Path(folder, "tuned.json").write_text(text)
        # whose forward was timed, and whose backward failed, may be half of a pair
        assert {*ma.plan(call).kernel.name.split("/")} <= {"dot_product", "memory_efficient"}


def test_segment_ids_on_the_command_line_are_an_array():
    from maxattn.tools.cli.masks import read_mask

    mask = read_mask("segment-ids:3,5")
    want = Segments(jnp.array([[0] * 3 + [1] * 5]), jnp.array([[0] * 3 + [1] * 5]))
    assert (
        mask.has_data
        and (
            np.asarray(mask.bind(8, 8).allowed(np.arange(8), np.arange(8)))
            == np.asarray(want.bind(8, 8).allowed(np.arange(8), np.arange(8)))
        ).all()
    )
