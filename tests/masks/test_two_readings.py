"""Arrays whose sizes coincide, so that their shape fits twice, are refused; remedies are right."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.errors import InputError

SIZES = [(2, 2, 2, 2), (2, 3, 2, 5), (2, 2, 3, 5), (3, 2, 4, 3), (1, 1, 3, 3), (2, 3, 4, 5)]
FULL = {"TS": "[None, None]", "BS": "[:, None, None]", "NTS": "[None]", "BTS": "[:, None]"}


def outs(name: str, array: Any, sizes: tuple[int, ...]) -> np.ndarray:
    b, n, t, s = sizes
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(b, x, n, 8)), "float32") for x in (t, s, s))
    return np.asarray(ma.attention(q, k, v, **{name: array}))


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("axes", FULL)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_array_is_read_one_way_or_refused(name: str, axes: str, sizes: tuple[int, ...]) -> None:
    rng, of = np.random.default_rng(1), dict(zip("BNTS", sizes, strict=True))
    array = rng.normal(size=[of[axis] for axis in axes]).astype("float32")
    array = array if name == "bias" else (array < 0) | (np.arange(of["S"]) == 0)
    written = f"[{', '.join(axes)}]"
    want = outs(name, eval("array" + FULL[axes]), sizes)
    try:
        got = outs(name, array, sizes)
    except InputError as error:
        ways = dict(way.split(" for ") for way in str(error.remedy).split("; ") if " for [" in way)
        found = [w.removeprefix("write ") for w, x in ways.items() if x[: len(written)] == written]
        if "it may also be" not in str(error.rule):
            assert name == "mask" or found or axes[0] == "N", error  # it fits no reading
            return
        got = outs(name, eval(found[0], {name: array, "masks": ma.masks}), sizes)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
