"""Query heads of a key head as rows of one head, in backwards of FlashAttention-4, on a CPU."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels import DotProduct
from maxattn.kernels.base import Grads, Inputs, Rows
from maxattn.kernels.fa4 import block_sparse, fold_groups, split_queries
from maxattn.kernels.fa4.block_sparse import TilePass
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.fa4.tile_sizes import Tile
from maxattn.kernels.fused.rectangles import PieceInputs
from tests.reference import attention64, error

PACKAGES = (("fa4-jax", "0.1.0"), ("tokamax", "0.0.17"))
H200 = ma.Target.named("NVIDIA H200", packages=PACKAGES)
FULL = M.Full()
CALL = ma.Call(2, 64, 300, 8, 2, 64, "bfloat16")


def backward(inputs: PieceInputs, rows: Rows) -> Grads:
    """Compute a rectangle by plain JAX."""
    assert inputs.q.shape[2] == inputs.k.shape[2], "the heads are to be folded"
    mask = M.Full() if inputs.lengths is None else M.KeyPadding(inputs.lengths)
    bound = mask.bind(inputs.q.shape[1], inputs.k.shape[1])
    return DotProduct(8**-0.5).backward(Inputs(inputs.q, inputs.k, inputs.v, mask=bound), rows)


@pytest.mark.parametrize("lengths", [None, (11, 5)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1)])
def test_against_float64(heads: int, kv_heads: int, lengths: tuple[int, ...] | None) -> None:
    """Every query head has another gradient, and every row another LSE."""
    t, s, rng = 7, 11, np.random.default_rng(1)
    sizes = (t, heads), (s, kv_heads), (s, kv_heads), (t, heads)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(2, *x, 8)), jnp.float32) for x in sizes)
    dlse = jnp.asarray(rng.normal(size=(2, heads, t)), jnp.float32)
    real = None if lengths is None else jnp.array(lengths)
    allowed = None if lengths is None else np.arange(s) < np.array(lengths)[:, None, None, None]
    want = attention64(q, k, v, allowed, dout=dout, dlse=dlse)
    rows = Rows(*(jnp.asarray(x, jnp.float32) for x in (want.out, want.lse)), dout, dlse)
    inputs = PieceInputs.whole(q, k, v, real)
    found = fold_groups.with_groups_folded(backward, inputs, rows)
    for name in ("dq", "dk", "dv"):
        assert error(getattr(found, name), getattr(want, name)) < 1e-5, name
        assert getattr(found, name).shape == getattr(want, name).shape


def test_it_pays_where_queries_are_few() -> None:
    def pays(t: int, s: int, heads: int = 8, kv_heads: int = 2) -> bool:
        return fold_groups.pays((2, t, heads, 64), (2, s, kv_heads, 64))

    assert pays(64, 64) and pays(384, 384) and pays(2048, 4096)
    assert not pays(512, 512) and not pays(384, 77) and not pays(2048, 4095)
    assert not pays(64, 64, 8, 8)


def test_which_calls_are_folded() -> None:
    assert fold_groups.call_of(CALL).heads == 2 and fold_groups.call_of(CALL).q_len == 256
    lengths = replace(CALL, mask=M.KeyPadding(np.array([40, 300])).bind(64, 300))
    assert fold_groups.call_of(lengths).q_len == 256
    assert fold_groups.call_of(replace(CALL, mask=M.Causal().bind(64, 300))).q_len == 64
    assert fold_groups.call_of(replace(CALL, q_len=310)).q_len == 310


def test_the_plan_says_so() -> None:
    config = ma.AttentionConfig(attention="flash")

    def backward_of(call: ma.Call) -> str:
        return ma.plan(call, config, target=H200).explain()

    folds = "; the 4 query heads of a key head as rows of one"
    assert folds in backward_of(CALL)
    assert folds in backward_of(replace(CALL, mask=M.KeyPadding(np.array([40, 300])).bind(64, 300)))
    assert folds not in backward_of(replace(CALL, mask=M.Causal().bind(64, 300)))
    assert folds not in backward_of(replace(CALL, kv_heads=8))


def test_few_queries_take_half_a_tile() -> None:
    """Up to head dim 64 the library's tile of 128 queries would be half empty."""
    config = ma.AttentionConfig(attention="flash")

    def said(t: int, head_dim: int = 64, mask: M.Mask = FULL) -> str:
        call = ma.Call(2, t, 300, 8, 8, head_dim, "bfloat16", mask.bind(t, 300))
        return ma.plan(call, config, target=H200).explain()

    assert "64x128 tiles" in said(64) and "64x128 tiles" in said(40, 40)
    assert "64x128 tiles" not in said(65) and "64x128 tiles" not in said(64, 72)
    # Of head dims 97 to 128 two tiles of 64 queries are less than two of 80, and four than four.
    assert all("64x128 tiles" not in said(t, 96) for t in (60, 128, 256))
    assert all("64x128 tiles" in said(t, h) for t in (60, 128, 256) for h in (104, 128))
    assert all("64x128 tiles" not in said(t, 128) for t in (70, 150, 200, 320, 1280))
    assert "block-sparse lists of 64x128 tiles" in said(64, mask=M.Causal())
    assert "block-sparse lists of 128x128 tiles" in said(129, mask=M.KeyPadding(np.array([9, 300])))


BAND = ma.Call(3, 64, 3456, 40, 5, 96, "bfloat16", M.Causal().bind(64, 3456))


def test_a_band_over_few_queries_folds_heads_over_the_keys_that_all_see() -> None:
    """3,392 keys before 64 queries are a call over all pairs."""
    whole, rest = fold_groups.folded_parts(BAND)
    assert (whole.q_len, whole.kv_len, whole.mask.is_full) == (64, 3392, True)
    assert (rest.q_len, rest.kv_len) == (64, 64)
    at = np.arange(64)
    assert (rest.mask.allowed(at, at) == np.tril(np.ones((64, 64), bool))).all()
    for alone in (replace(BAND, kv_heads=40), replace(BAND, mask=M.Causal(0).bind(64, 3456))):
        assert fold_groups.folded_parts(alone) == (alone,)
    last = replace(BAND, q_len=1, mask=M.Causal().bind(1, 3456))
    (whole,) = fold_groups.folded_parts(last)
    assert whole.mask.is_full and whole.kv_len == 3456


def test_the_plan_says_how_the_keys_that_all_see_are_launched() -> None:
    config = ma.AttentionConfig(attention="flash")

    def said(call: ma.Call) -> str:
        return ma.plan(call, config, target=H200).explain()

    keys = "backward: the library's own; of the 3,392 keys that all queries see, "
    assert f"{keys}the library's own; the 8 query heads of a key head as rows of one" in said(BAND)
    plain = replace(BAND, heads=40, kv_heads=40, head_dim=128)
    assert "backward: block-sparse lists of 64x128 tiles" in said(plain)


@pytest.mark.parametrize(
    ("t", "head_dim", "narrow"),
    [(128, 128, True), (128, 96, False), (200, 128, False), (64, 64, True)],
)
def test_few_queries_are_launched_with_their_tile(
    t: int, head_dim: int, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tile goes to the kernel; no GPU is here, and shapes alone are traced."""
    launched = []

    def sparse(inputs: PieceInputs, rows: Rows, tiles: TilePass) -> Grads:
        launched.append(tiles.tile)
        return Grads(inputs.q, inputs.k, inputs.v)

    def library(inputs: PieceInputs, *_: object) -> Grads:
        launched.append(None)
        return Grads(inputs.q, inputs.k, inputs.v)

    monkeypatch.setattr(block_sparse, "backward", sparse)
    monkeypatch.setattr(split_queries, "backward", library)
    kernel = Fa4(1.0, version="0.1.0", launched=True)
    x, k = (jnp.zeros((1, n, 2, head_dim), jnp.bfloat16) for n in (t, 300))
    lse = jnp.zeros((1, 2, t), jnp.float32)
    inputs = PieceInputs.whole(x, k, k, None)
    jax.eval_shape(kernel.piece_backward, inputs, Rows(x, lse, x, lse))
    assert launched == [Tile(64, 128) if narrow else None]
