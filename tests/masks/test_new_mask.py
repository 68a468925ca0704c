"""A mask that maxattn has never met, one class each: right and fast in every kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError
from maxattn.kernels.base import Inputs, refuse_mask
from maxattn.kernels.blockwise.chunk_sizes import SPARSE_CHUNK, choose_chunks
from maxattn.kernels.blockwise.visits import visits
from maxattn.kernels.fa4.block_sparse_lists import TilingSpec, tally, tiling
from maxattn.kernels.flash import Flash
from maxattn.kernels.splash.mask_codes import OneInterval, Positions, encode
from maxattn.kernels.splash.mask_info import codes_of, mask_info
from maxattn.masks.terms import sort_terms
from maxattn.masks.tile_kinds import tile_kinds
from tests.kernels.test_flash import UNFUSED
from tests.reference import attention64, error


@M.mask_type
class Diagonal(M.PositionMask):
    """Allow the keys from `first` to `last` after the query."""

    first: int
    last: int
    offset: int | None = None

    def seen(self, pos, xp):
        return ((pos + self.first, pos + self.last + 1),)


@M.mask_type
class Dilated(M.PositionMask):
    """Allow every `step`-th key on both sides of the query, `count` of them on each."""

    step: int
    count: int
    offset: int | None = None

    def seen(self, pos, xp):
        near = (pos + n * self.step for n in range(-self.count, self.count + 1))
        return tuple((key, key + 1) for key in near)


@M.mask_type
class Pages(M.PositionMask):
    """Allow the query's own page, and the first `head` keys of the page before it."""

    page: int
    head: int
    offset: int | None = None

    def seen(self, pos, xp):
        start = pos // self.page * self.page
        before = xp.maximum(start - self.page, 0)
        return (start, start + self.page), (before, xp.minimum(before + self.head, start))

    def own_period(self):
        return self.page


LENGTH, TILE = 384, 128
NEW = {"diagonal": Diagonal(-9, 40), "dilated": Dilated(30, 2), "pages": Pages(96, 5)}
MEANING = {
    "diagonal": lambda q, k: (k >= q - 9) & (k <= q + 40),
    "dilated": lambda q, k: ((k - q) % 30 == 0) & (abs(k - q) <= 60),
    "pages": lambda q, k: (q // 96 == k // 96) | ((k // 96 == q // 96 - 1) & (k % 96 < 5)),
}
BLOCKWISE = {"attention": "dot_product", "use_memory_efficient_attention": True}
KERNELS = {
    "dot_product": {"attention": "dot_product"},
    "memory_efficient": BLOCKWISE | {"query_chunk_size": TILE, "key_chunk_size": TILE},
    "flash": {"attention": "flash", "flash_block_sizes": {"block_q": TILE, "block_kv": TILE}},
}


def allowed(name: str, length: int = LENGTH) -> np.ndarray:
    q, k = np.arange(length)[:, None], np.arange(length)[None]
    return MEANING[name](q, k)


def arrays(count: int = 3) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(1, LENGTH, 2, 64)), "float32") for _ in range(count)]


@pytest.mark.parametrize("name", NEW)
def test_it_is_bound_drawn_counted_and_combined(name: str) -> None:
    mask, want = NEW[name], allowed(name)
    bound = mask.bind(LENGTH, LENGTH)
    assert bound.offset == 0 and bound.form() == bound and hash(bound) == hash(mask.bind(9, 9))
    at = np.arange(LENGTH)
    assert (np.asarray(bound.allowed(at, at))[0, 0] == want).all()
    assert bound.allowed_pairs(LENGTH, LENGTH) == want.sum()
    picture = [line.replace(" ", "") for line in mask.show(32, 32).splitlines()[2:]]
    assert picture == ["".join("█" if x else "·" for x in row) for row in allowed(name, 32)]
    either = (~mask | M.KeyPadding(np.array([7]))).bind(LENGTH, LENGTH)
    assert (np.asarray(either.allowed(at, at))[0, 0] == (~want | (at < 7)[None])).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", NEW)
def test_forward_and_gradient_against_float64(name: str, kernel: str) -> None:
    mask, config = NEW[name], ma.AttentionConfig(**KERNELS[kernel])
    q, k, v, weight = arrays(4)
    plan = ma.plan(ma.Call.of(q, k, mask=mask), config)
    assert plan.kernel.name == kernel and type(mask).__name__ in plan.explain()

    def loss(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = ma.attention(*x, mask=mask, config=config)
        return (out * weight).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    want = attention64(q, k, v, allowed(name)[None, None], dout=weight)
    assert max(error(g, w) for g, w in zip((out, *grads), want[:1] + want[2:5], strict=True)) < 2e-5


@pytest.mark.parametrize("kernel", ["memory_efficient", "flash"])
@pytest.mark.parametrize("name", NEW)
def test_a_kernel_never_reads_what_is_empty(name: str, kernel: str) -> None:
    """Keys that are NaN spoil every query tile that reads their tile, allowed or not."""
    q, k, v = arrays()
    spoilt = jnp.arange(LENGTH)[None, :, None, None] >= LENGTH - TILE
    k, v = (jnp.where(spoilt, jnp.nan, x) for x in (k, v))
    config = ma.AttentionConfig(**KERNELS[kernel])
    out = ma.attention(q, k, v, mask=NEW[name], config=config)
    assert not allowed(name)[:TILE, LENGTH - TILE :].any()
    assert np.isfinite(np.asarray(out[:, :TILE])).all()
    assert np.isnan(np.asarray(out[:, -TILE:])).any()


@pytest.mark.parametrize("name", NEW)
def test_every_list_of_tiles_leaves_out_what_is_empty(name: str) -> None:
    length, tile = 8 * TILE, (TILE, TILE)
    mask = NEW[name].bind(length, length)
    tiles = allowed(name, length).reshape(8, TILE, 8, TILE).any((1, 3))
    some = tiles.sum()
    assert some < 30
    assert visits(mask, *tile, length, length).count.sum() == some
    traced = jax.jit(lambda at: visits(mask, *tile, length, length, at, at).count)(0)
    assert int(traced.sum()) == some
    kinds = tile_kinds(mask, *tile, length, length, 0, 0)
    info = mask_info(kinds, codes_of(mask, kinds, length, length, False, 0, 0), length)
    assert int(info.block_mask.sum()) == some
    assert tally(mask, tile, (length, length)).skipped == 64 - some
    spec = TilingSpec(mask, tile, tile, (length, length))
    lists = tiling(spec, (0, 0))
    assert lists.forward.work.sum() == lists.backward.work.sum() == some


def test_what_the_base_class_answers() -> None:
    shape = jax.ShapeDtypeStruct((1, 8192, 2, 64), "bfloat16")
    chunks = {
        name: choose_chunks(ma.Call.of(shape, shape, mask=NEW[name]), None, None) for name in NEW
    }
    assert chunks["diagonal"] == chunks["dilated"] == (SPARSE_CHUNK, SPARSE_CHUNK)
    paged = choose_chunks(ma.Call.of(shape, shape, mask=Pages(1560, 5)), None, None)
    assert paged == (780, 780)
    for mask in NEW.values():
        assert mask.divides_positions and mask.leaves_parts_empty
        assert mask.band() is mask.most_keys() is mask.key_limit() is mask.segment_ids() is None
        assert refuse_mask("cudnn", sort_terms(mask.bind(64, 64))) is not None


def test_splash_takes_two_comparisons_for_one_interval() -> None:
    codes = {name: type(encode(NEW[name].bind(64, 64), 64, 64, 0, 0).code) for name in NEW}
    assert codes == {"diagonal": OneInterval, "dilated": Positions, "pages": Positions}


@pytest.mark.parametrize("name", NEW)
def test_it_lowers_into_a_tpu_kernel(name: str) -> None:
    mask = NEW[name].bind(LENGTH, LENGTH)
    kernel = Flash(0.125, UNFUSED)

    def run(q, k, v, start):
        return kernel.forward(Inputs(q, k, v, None, mask, start, 0)).out

    traced = jax.jit(run).trace(*arrays(), jnp.int32(0))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if i else n for i, n in enumerate(NEW)]
)
def test_on_a_ring(name: str) -> None:
    sizes = {"ici_data_parallelism": 1, "ici_context_parallelism": 4}
    config = ma.AttentionConfig(**BLOCKWISE, context_parallel="ring", **sizes)
    mesh, x = config.make_mesh(jax.devices()[:4]), arrays()

    def loss(*x: jax.Array) -> jax.Array:
        return ma.attention(*x, mask=NEW[name], config=config, mesh=mesh).sum()

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(*x)
    want = attention64(*x, allowed(name)[None, None], dout=jnp.ones_like(x[0]))
    assert max(error(g, w) for g, w in zip(grads, want[2:5], strict=True)) < 2e-5


def test_a_property_that_is_written_as_a_method_is_refused() -> None:
    said = r"Plain\.divides_positions: a method\n.*\n.*write @property"
    with pytest.raises(InputError, match=said):

        @M.mask_type
        class Plain(M.PositionMask):
            offset: int | None = None

            def divides_positions(self) -> bool:  # type: ignore[override]
                return False
