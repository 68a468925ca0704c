"""A `Call` made by hand is checked, and normalised to the form that `Call.of` gives."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.call import Call
from maxattn.errors import InputError

GOOD: dict[str, Any] = {
    "batch": 2, "q_len": 8, "kv_len": 12, "heads": 6, "kv_heads": 3, "head_dim": 16,
}  # fmt: skip
NAN, INF = float("nan"), float("inf")
SIZES = (0, -5, True, False, 2.0, "8", None, NAN, jnp.ones(()), np.ones(2, int), -(10**5000))
DTYPES = ("float64", "int8", "f32", "", None, 7, jnp.float32, [], np.dtype("f4"))
BAD: list[tuple[str, Any]] = [
    *[(name, size) for name in GOOD for size in SIZES],
    *[("kv_heads", n) for n in (4, 5, 12)],
    *[("dtype", x) for x in DTYPES],
    *[("scale", x) for x in (NAN, INF, -INF, "1", True, 1j, [2.0])],
    *[("scale", x) for x in (10**400, 1e39, 1e-45, jnp.ones(2))],
    *[("role", x) for x in ("Self", "both", None, 1, [], {})],
    *[("mask", x) for x in (None, np.ones((8, 12), bool), "causal", M.Causal, [M.Full()])],
    ("mask", M.KeyPadding(np.array([1, 2, 3]))),
    ("mask", M.Dense(np.ones((8, 11), bool))),
    ("mask", M.KeyPadding(jax.ShapeDtypeStruct((3,), "int32"))),
    ("mask", M.VideoMask(3, 5)),
    *[("bias", x) for x in ((2, 6, 8), (2, 6, 8, 12, 1), (2, 6, 8, 11), (3, 1, 1, 1))],
    *[("bias", x) for x in ((0, 1, 1, 1), (1, 1, 1, -1), (1, 1, 1, True), (1, 1, 1.0, 1), "x")],
    *[("bias", x) for x in (4, np.ones(4))],
    *[("sequence", x) for x in ((8,), (8, 0), 8, "88", (8, 12, 1), (8.0, 12.0), (True, 12))],
    *[(name, x) for name in ("return_lse", "sharded") for x in (None, 1, "yes", [])],
]  # fmt: skip


@pytest.mark.parametrize("name, value", BAD, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BAD)])
def test_a_field_that_is_wrong_is_named(name: str, value: Any) -> None:
    with pytest.raises(InputError) as error:
        Call(**{**GOOD, name: value})
    assert error.value.setting.split(".")[0] in (name, "KeyPadding", "Dense")
    with pytest.raises(InputError):
        replace(Call(**GOOD), **{name: value})


def test_more_queries_than_keys_have_no_causal_offset() -> None:
    with pytest.raises(InputError, match="needs q_len <= kv_len"):
        Call(1, 12, 8, 1, 1, 16, mask=M.Causal())


MASKS = [
    M.Causal(), M.Full() & M.Full(), M.And((M.Causal(), M.And((M.KeyLimit(3), M.Causal())))),
    M.KeyPadding(np.array([3, 5])) & M.LocalWindow(2, 2), M.Dense(np.ones((8, 12), bool)),
    M.Dense(jax.ShapeDtypeStruct((8, 12), "bool")),
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_it_is_what_arrays_give(mask: M.Mask) -> None:
    by_hand = Call(**GOOD, mask=mask, bias=(1, 6, 8, 1), scale=0.5, role="cross", return_lse=True)
    bias = jax.ShapeDtypeStruct((6, 8, 1), "float32")
    q, k = (jax.ShapeDtypeStruct(x, "float32") for x in ((2, 8, 6, 16), (2, 12, 3, 16)))
    of = Call.of(q, k, mask=mask, bias=bias, scale=0.5, role="cross", return_lse=True)
    assert by_hand == of and hash(by_hand) == hash(of) and repr(by_hand) == repr(of)
    assert ma.plan(by_hand) is ma.plan(of)
    assert replace(of) == of == pickle.loads(pickle.dumps(of))


def test_numpy_integers_are_sizes_and_the_scale_has_a_default() -> None:
    call = Call(*(np.int64(n) for n in GOOD.values()))
    assert call == Call(**GOOD) and all(type(getattr(call, name)) is int for name in GOOD)
    assert Call(**GOOD).scale == Call(**GOOD, scale=0).scale == 16**-0.5
    assert replace(call, scale=2).scale == 2.0


def test_it_stays_frozen_and_a_derived_one_is_not_checked() -> None:
    call = Call(**GOOD, bias=(2, 6, 8, 12))
    with pytest.raises(FrozenInstanceError):
        call.batch = 3  # pyright: ignore[reportAttributeAccessIssue]
    share = call.derived(q_len=2, kv_heads=1)
    assert (share.q_len, share.kv_heads, share.bias) == (2, 1, (2, 6, 8, 12))
    assert call.q_len == 8 and share != call and hash(share) != hash(call)


def test_a_share_has_a_bound_mask_and_a_bias_of_the_whole() -> None:
    share = Call(**GOOD, sharded=True, bias=(2, 6, 64, 96), mask=M.VideoMask(16, 6, offset=0))
    assert share.bias == (2, 6, 64, 96)
    with pytest.raises(InputError, match="bound to the lengths of the whole"):
        Call(**GOOD, sharded=True, mask=M.Causal())
