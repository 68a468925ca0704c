"""The code around GPU libraries, on a CPU: rectangles, merging, lengths, flags, dLSE."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.errors import Unsupported
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.composed.pair import Pair
from maxattn.kernels.dot_product import DotProduct
from maxattn.masks import Band, Causal, Full
from maxattn.masks.band_pieces import fits_shards, pieces, shifts
from maxattn.masks.terms import sort_terms
from tests.cases import HEADS, LENGTHS, MASKS, allowed, arrays, compare
from tests.gpu.dense import DenseLibrary
from tests.pairwise import name_of, pairwise
from tests.reference import attention64, error
from tests.waiting import but, few

TAKEN = ["full", "causal", "window", "lengths", "flags", "causal & lengths", "nothing"]
LIBRARY, PLAIN = DenseLibrary(20**-0.5, lse_gradient=True), DotProduct(20**-0.5)
# Of a pair the first has the forward, and the second the backward.
KERNELS = {
    "library": LIBRARY,
    "library after another": Pair(PLAIN, LIBRARY),
    "library before another": Pair(LIBRARY, PLAIN),
}
AXES = {
    "kernel": list(KERNELS),
    "mask": TAKEN,
    "heads": ["mha", "gqa"],
    "length": ["64", "odd", "cross", "one"],
    "head_dim": [20],
    "batch": [3],
    "traced": [False, True],
    "bias": ["none"],
    "dtype": ["float32"],
}


def legal(case: dict) -> bool:
    """Between shards, kernels need queries and keys in shards of one length for bands."""
    t, s = LENGTHS[case["length"]]
    mask = MASKS[case["mask"]](1, 1, t, s)
    return not case["traced"] or mask is None or fits_shards(sort_terms(mask.bind(t, s)), t, s)


@pytest.mark.parametrize("case", few(pairwise(AXES, legal)), ids=name_of)
def test_around_a_dense_library(case: dict) -> None:
    x = arrays(case)
    t, s = x["q"].shape[1], x["k"].shape[1]
    ok = allowed(x["mask"], t, s)
    dlse = jnp.where(True if ok is None else ok.any(-1), x["dlse"], 0.0)
    bound = (t, s, case["batch"], HEADS[case["heads"]][0])
    mask = Full() if x["mask"] is None else x["mask"].bind(*bound)
    kernel = KERNELS[case["kernel"]]

    @partial(jax.jit, static_argnums=() if case["traced"] else 0)
    def both(offset, q, k, v, mask):
        inputs = Inputs(q, k, v, None, mask, offset)
        out, lse = kernel.forward(inputs)
        return out, lse, *kernel.backward(inputs, Rows(out, lse, x["dout"], dlse))[:3]

    got = both(0, x["q"], x["k"], x["v"], mask)
    want = attention64(x["q"], x["k"], x["v"], ok, dout=x["dout"], dlse=dlse)
    compare(got, want)


def test_rectangles_in_64_bit_mode() -> None:
    """For traced offsets all branches have results of equal dtypes, also those without keys."""
    case = {name: values[0] for name, values in AXES.items()}
    with jax.enable_x64(True):
        test_around_a_dense_library(case | {"mask": "causal", "traced": True})


@pytest.mark.parametrize(
    "band",
    [Band(), Band(None, 0), Band(4, 0), Band(3, 5), Band(2, None)],
)
@pytest.mark.parametrize("lengths", [(6, 6), (4, 12), (9, 6), (1, 7)])
def test_pieces_say_the_band_at_every_shift(band: Band, lengths: tuple[int, int]) -> None:
    t, s = lengths
    for shift in range(-t - 8, s + 8):
        want = _band(band, shift, t, s)
        got = np.zeros((t, s), int)
        for p in pieces(band, shift, t, s):
            assert p.left is None or p.left >= 0
            assert p.right is None or p.right >= 0
            got[p.q0 : p.q1, p.k0 : p.k1] += _band(
                Band(p.left, p.right), 0, p.q1 - p.q0, p.k1 - p.k0
            )
        assert (got == want).all(), (band, shift, pieces(band, shift, t, s))


@pytest.mark.parametrize("band", [Band(None, 0), Band(4, 0), Band(3, 5), Band(None, 0, 7)])
@pytest.mark.parametrize("lengths", [(6, 6), (4, 12), (12, 4)])
def test_shifts_hold_every_distance_of_shards(band: Band, lengths: tuple[int, int]) -> None:
    t, s = lengths
    cases = shifts(band, t, s)
    for i in range(6):
        for j in range(6):
            shift = i * t - j * s + band.offset
            nearest = min(max(shift, cases[0]), cases[-1])
            assert nearest in cases
            assert (_band(band, nearest, t, s) == _band(band, shift, t, s)).all()


def between(t: int, s: int) -> tuple[Inputs, Rows]:
    """Return a causal call of t queries and s keys, and the inputs of its backward."""
    rng = np.random.default_rng(2)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(1, n, 2, 8)), jnp.float32) for n in (t, s, s, t))
    stats = jnp.zeros((1, 2, t))
    return Inputs(q, k, v, mask=Causal()), Rows(dout, stats, dout, stats)


@pytest.mark.parametrize(("t", "s"), [(4, 8), (8, 4), (6, 4)])
def test_traced_offsets_of_unlike_shards_are_refused(t: int, s: int) -> None:
    kernel, (inputs, rows) = DenseLibrary(0.3), between(t, s)

    def forward(offset):
        return kernel.forward(inputs.replace(q_offset=offset))

    def backward(offset):
        return kernel.backward(inputs.replace(q_offset=offset), rows)

    for run in (forward, backward):
        with pytest.raises(Unsupported, match="shards of one length") as refused:
            jax.eval_shape(run, jnp.int32(0))
        assert refused.value.setting == "q_offset, kv_offset"
        assert f"{t} queries and {s} keys" in str(refused.value)


@pytest.mark.parametrize("offset", but([1, 3, -2, 5], [3, -2]))
def test_any_distance_is_computed_where_it_is_known(offset: int) -> None:
    """Traced offsets must be multiples of a shard: others cannot be enumerated in advance."""
    kernel, (inputs, _) = DenseLibrary(0.3), between(4, 4)
    ok = np.arange(4)[None] <= np.arange(4)[:, None] + offset
    want = attention64(inputs.q, inputs.k, inputs.v, ok, scale=0.3)
    known = kernel.forward(inputs.replace(q_offset=offset))
    assert error(known.out, want.out) < 2e-5
    traced = jax.jit(lambda at: kernel.forward(inputs.replace(q_offset=at)))
    apart = 4 * round(offset / 4) == offset or offset > 4
    assert bool(jnp.isnan(traced(offset).out).any()) is not apart
    for whole in (-4, 0, 4, 8):
        assert not jnp.isnan(traced(whole).out).any()


def _band(band: Band, shift: int, t: int, s: int) -> np.ndarray:
    row, key = np.arange(t)[:, None] + shift, np.arange(s)[None]
    low = np.ones((t, s), bool) if band.left is None else key >= row - band.left
    return low if band.right is None else low & (key <= row + band.right)
