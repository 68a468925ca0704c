"""Masks of positions, and a few user-defined ones: right in every kernel, and tiles are skipped.

Each is compared with a table of pairs that follows the mask's name.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError
from maxattn.kernels.base import Inputs
from maxattn.kernels.blockwise.visits import visits
from maxattn.kernels.fa4.lists import masked_inputs
from maxattn.kernels.fa4.problem import of_inputs
from maxattn.kernels.fa4.tiles import Tile
from maxattn.kernels.flash import Flash
from maxattn.kernels.splash.mask_info import codes_of, mask_info
from maxattn.masks.tile_kinds import tile_kinds
from tests.context_parallel.test_ring import CONFIG as RING
from tests.context_parallel.test_ring import qkv, sends
from tests.kernels.test_flash import UNFUSED
from tests.reference import attention64, error

TILE, LENGTH = 128, 512
AT = np.arange(LENGTH)
Q, K = AT[:, None], AT[None]
BLOCKWISE = {"attention": "dot_product", "use_memory_efficient_attention": True}
KERNELS = {
    "dot_product": {"attention": "dot_product"},
    "memory_efficient": BLOCKWISE | {"query_chunk_size": TILE, "key_chunk_size": TILE},
    "flash": {"attention": "flash", "flash_block_sizes": {"block_q": TILE, "block_kv": TILE}},
}


# ---- masks that maxattn has never met ------------------------------------------------------------


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
    """Allow every `step`-th key on both sides of the query, `count` on each."""

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


NEW = {"diagonal": Diagonal(-9, 40), "dilated": Dilated(30, 2), "pages": Pages(96, 5)}
PAGE = Q // 96 - K // 96

# ---- segments of known lengths -------------------------------------------------------------------

LENGTHS, KV_LENGTHS = (200, 56, 1, 255), (12, 300, 0, 200)
PACKED = M.Segments.of_lengths(LENGTHS)
SEGMENT, OTHER = (np.repeat(np.arange(4), lengths) for lengths in (LENGTHS, KV_LENGTHS))
SAME_SEGMENT = SEGMENT[:, None] == SEGMENT[None]

# ---- rectangles ----------------------------------------------------------------------------------

# Flux.2: text and picture see all, reference tokens themselves alone.
OWN = 384
REFERENCES = M.Rectangle(0, OWN, 0, LENGTH) | M.Rectangle(OWN, LENGTH, OWN, LENGTH)

# Qwen-Image 2.1: a causal text, and pictures whose tokens see each other.
PICTURES = (100, 228), (300, 500)
CAUSAL_OR_PICTURE = M.Causal() | M.Rectangle(*PICTURES[0] * 2) | M.Rectangle(*PICTURES[1] * 2)
PICTURE = np.sum([i * ((a <= AT) & (b > AT)) for i, (a, b) in enumerate(PICTURES, 1)], axis=0)

# More rectangles than a kernel takes intervals: steps of ten with a sink, and blocks of ten.
STEPS = M.Rectangle(0, 500, 0, 7) | M.Or(
    tuple(M.Rectangle(i, i + 10, max(i - 90, 0), i + 10) for i in range(0, LENGTH, 10))
)
TALL = reduce(or_, (M.Rectangle(i, i + 10, i, i + 10) for i in range(0, LENGTH, 10)))

# Block diffusion: blocks of a clean sequence, then the same blocks noisy, each of which sees itself
# and the clean blocks before its own.
HALF, BLOCK = LENGTH // 2, 32
CLEAN = M.BlockCausal(BLOCK) & M.Rectangle(0, HALF, 0, HALF)
BEFORE = M.BlockCausal(BLOCK, offset=-HALF - BLOCK) & M.Rectangle(HALF, LENGTH, 0, HALF)
ITSELF = M.BlockSlidingWindow(BLOCK, 1) & M.Rectangle(HALF, LENGTH, HALF, LENGTH)
NOISY_Q, NOISY_K = Q >= HALF, K >= HALF
AGE = Q % HALF // BLOCK - K % HALF // BLOCK
CLEAN_AND_NOISY = (~NOISY_K & np.where(NOISY_Q, AGE > 0, AGE >= 0)) | (
    NOISY_Q & NOISY_K & (AGE == 0)
)

# Segments of several lengths, each of which sees itself and those before it.
ENDS = 60, 200, 201, 512
BY_SEGMENT = M.Empty()
for begin, end in zip((0, *ENDS), ENDS, strict=False):
    BY_SEGMENT = BY_SEGMENT | M.Rectangle(begin, end, 0, end)


class Case(NamedTuple):
    """A mask, its pairs, and the kernels that `make test` compares with float64.

    The dense kernel runs a few masks; kernels that skip tiles run most; flash, which is
    interpreted,
    one of each form.
    """

    mask: M.Mask
    allowed: np.ndarray
    kernels: tuple[str, ...] = ("memory_efficient",)


def teacher(mask: M.TeacherForcing) -> Case:
    """Return the pairs of a mask that test_teacher_forcing.py compares with its definition."""
    return Case(mask, np.asarray(mask.bind(LENGTH, LENGTH).allowed(AT, AT))[0, 0], ())


FLASH = ("memory_efficient", "flash")
CASES = {
    "diagonal": Case(NEW["diagonal"], (K >= Q - 9) & (K <= Q + 40), tuple(KERNELS)),
    "dilated": Case(NEW["dilated"], ((K - Q) % 30 == 0) & (abs(K - Q) <= 60)),
    "pages": Case(NEW["pages"], (PAGE == 0) | ((PAGE == 1) & (K % 96 < 5)), FLASH),
    "packed": Case(PACKED, SAME_SEGMENT),
    "packed, other keys": Case(
        M.Segments.of_lengths(LENGTHS, KV_LENGTHS), SEGMENT[:, None] == OTHER[None]
    ),
    "packed, causal": Case(PACKED & M.Causal(), SAME_SEGMENT & (K <= Q)),
    "packed, sink": Case(PACKED | M.KeyLimit(16), SAME_SEGMENT | (K < 16), FLASH),
    "between segments": Case(~PACKED, ~SAME_SEGMENT),
    "references": Case(REFERENCES, (Q < OWN) | (K >= OWN), ()),
    "causal or the same picture": Case(
        CAUSAL_OR_PICTURE, (K <= Q) | ((PICTURE[:, None] == PICTURE) & (PICTURE[:, None] > 0)), ()
    ),
    "clean and noisy blocks": Case(CLEAN | BEFORE | ITSELF, CLEAN_AND_NOISY),
    "causal by segment": Case(
        BY_SEGMENT, np.searchsorted(ENDS, K, "right") <= np.searchsorted(ENDS, Q, "right"), ()
    ),
    "many rectangles": Case(
        STEPS, (K < Q // 10 * 10 + 10) & (K >= Q // 10 * 10 - 90) | (K < 7) & (Q < 500), FLASH
    ),
    "many rectangles, causal": Case(
        TALL & M.Causal(), (K // 10 == Q // 10) & (K <= Q), tuple(KERNELS)
    ),
    "one rectangle": Case(
        M.Rectangle(130, 300, 7, 260), (Q >= 130) & (Q < 300) & (K >= 7) & (K < 260), ()
    ),
    "teacher": teacher(M.TeacherForcing(8, 32, 2, 2, 1))._replace(kernels=tuple(KERNELS)),
    "teacher, dealt": teacher(M.TeacherForcing(8, 32, 1, 3, 1, shards=4)),
}


def arrays(*shape: int) -> list[jax.Array]:
    """Draw q, k, v and the gradient of the output."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), "float32") for _ in range(4)]


def worst(mask: M.Mask, allowed: np.ndarray, x: list[jax.Array], config: Any, mesh: Any) -> float:
    """Return the largest error of the output and the gradients against float64."""
    *operands, weight = x

    def loss(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = ma.attention(*x, mask=mask, config=config, mesh=mesh)
        return (out * weight).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*operands)
    want = attention64(*operands, allowed, dout=weight)
    return max(error(g, w) for g, w in zip((out, *grads), want[:1] + want[2:5], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_pairs_are_those_that_it_names(name: str) -> None:
    mask, want = CASES[name].mask.bind(LENGTH, LENGTH), CASES[name].allowed
    np.testing.assert_array_equal(np.asarray(mask.allowed(AT, AT))[0, 0], want)
    assert mask.allowed_pairs(LENGTH, LENGTH) == want.sum()
    padded = (~mask | M.KeyPadding(np.array([7]))).bind(LENGTH, LENGTH)
    np.testing.assert_array_equal(np.asarray(padded.allowed(AT, AT))[0, 0], ~want | (K < 7))


@pytest.mark.parametrize("name", CASES)
def test_no_list_of_tiles_has_an_empty_one(name: str) -> None:
    mask = CASES[name].mask.bind(LENGTH, LENGTH)
    sizes = TILE, TILE, LENGTH, LENGTH
    some = CASES[name].allowed.reshape(4, TILE, 4, TILE).any((1, 3))
    assert visits(mask, *sizes).count.sum() == some.sum()
    traced = jax.jit(lambda at: visits(mask, *sizes, at, at).count)(0)
    assert int(traced.sum()) == some.sum()
    kinds = tile_kinds(mask, *sizes, 0, 0)
    np.testing.assert_array_equal(kinds != M.EMPTY, some)
    info = mask_info(kinds, codes_of(mask, kinds, LENGTH, LENGTH, False, 0, 0), LENGTH)
    assert int((info.block_mask > 0).sum()) == some.sum()


@pytest.mark.parametrize("name", CASES)
def test_flash_attention_4_tests_the_same_pairs(name: str) -> None:
    """Its kernel looks up each query's intervals, as it does for traced positions."""
    mask, want = CASES[name].mask.bind(LENGTH, LENGTH), CASES[name].allowed
    x = jnp.zeros((1, LENGTH, 2, 64), jnp.bfloat16)
    inputs = Inputs(x, x, x, None, mask)
    given = masked_inputs(of_inputs(inputs, 132), Tile(TILE, TILE), inputs, "queries")
    assert given.test is not None
    arrays = tuple(np.asarray(x) for x in given.arrays)
    np.testing.assert_array_equal(given.test(0, Q, K, arrays, np), want)
    assert given.all_see == bool(want.any(axis=1).all())


@pytest.mark.parametrize("name", CASES)
def test_auto_takes_a_kernel_that_skips_by_it(name: str) -> None:
    call = ma.Call(1, LENGTH, LENGTH, 8, 8, 128, dtype="bfloat16", mask=CASES[name].mask)
    target = ma.Target.named("NVIDIA H200", (("fa4-jax", "0.1.0"),))
    assert ma.plan(call, ma.AttentionConfig(attention="auto"), target=target).kernel.name == "flash"


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        pytest.param(name, kernel, marks=() if kernel in case.kernels else pytest.mark.slow)
        for name, case in CASES.items()
        for kernel in KERNELS
    ],
)
def test_forward_and_gradients_against_float64(name: str, kernel: str) -> None:
    config, x = ma.AttentionConfig(**KERNELS[kernel]), arrays(1, LENGTH, 1, 64)
    mask, allowed, _ = CASES[name]
    plan = ma.plan(ma.Call.of(*x[:2], mask=mask), config)
    assert plan.kernel.name == kernel
    assert worst(mask, allowed[None, None], x, config, None) < 2e-5


@pytest.mark.parametrize("kernel", ["memory_efficient", "flash"])
@pytest.mark.parametrize("name", ["diagonal", "packed"])
def test_a_kernel_never_reads_a_tile_that_is_empty(name: str, kernel: str) -> None:
    """Keys that are NaN spoil every query tile that reads their tile."""
    q, k, v, _ = arrays(1, LENGTH, 2, 64)
    k, v = (x.at[:, LENGTH - TILE :].set(jnp.nan) for x in (k, v))
    config = ma.AttentionConfig(**KERNELS[kernel])
    out = ma.attention(q, k, v, mask=CASES[name].mask, config=config)
    assert np.isfinite(np.asarray(out[:, :TILE])).all()
    assert np.isnan(np.asarray(out[:, -TILE:])).any()


MESHES = {
    "packed": (M.Segments.of_lengths((9, 1, 30, 21)), 61),
    "rectangle": (M.Causal() | M.Rectangle(10, 40, 12, 50), 61),
    "teacher": (M.TeacherForcing(8, 4, 1, 2, 1, shards=8), 64),
    "dilated": (Dilated(7, 2), 61),
}
USUAL = {("dilated", "ring"), ("packed", "ulysses"), ("packed", "all_gather")}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, how, marks=() if (name, how) in USUAL else pytest.mark.slow)
        for name in MESHES
        for how in ("ring", "ulysses", "all_gather")
    ],
)
def test_on_a_mesh_against_float64(name: str, strategy: str) -> None:
    config = RING.replace(attention="dot_product", context_parallel=strategy)
    mask, length = MESHES[name]
    x, at = [*qkv(length, heads=8), jnp.ones((1, length, 8, 16))], np.arange(length)
    allowed = np.asarray(mask.bind(length, length).allowed(at, at))
    assert worst(mask, allowed, x, config, config.make_mesh()) < 2e-5


def test_hops_between_segments_are_not_made() -> None:
    """Eight ranks of eight tokens: each segment is on one rank, or one segment is on two.

    In the latter case K and V are sent to both neighbours, and their gradients one hop back.
    """
    assert sends(M.Segments.of_lengths((8, 5, 3, 8, 2, 6, 8, 8, 8, 8))) == (0, 0)
    assert sends(M.Segments.of_lengths((8, 16, 5, 3, 8, 8, 8, 8))) == (4, 4 + 4 + 6)


# ---- a new mask ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
def test_a_new_mask_is_a_value_that_is_drawn(name: str) -> None:
    mask = NEW[name]
    bound = mask.bind(LENGTH, LENGTH)
    assert bound.offset == 0 and bound.form() == bound and hash(bound) == hash(mask.bind(9, 9))
    picture = [line.replace(" ", "") for line in mask.show(32, 32).splitlines()[2:]]
    want = CASES[name].allowed[:32, :32]
    assert picture == ["".join("█" if x else "·" for x in row) for row in want]
    call = ma.Call(1, LENGTH, LENGTH, 1, 1, 64, mask=mask)
    assert type(mask).__name__ in ma.plan(call).explain()


@pytest.mark.parametrize("name", NEW)
def test_it_lowers_into_a_tpu_kernel(name: str) -> None:
    mask, kernel = NEW[name].bind(LENGTH, LENGTH), Flash(0.125, UNFUSED)

    def run(q, k, v, start):
        return kernel.forward(Inputs(q, k, v, None, mask, start, 0)).out

    traced = jax.jit(run).trace(*arrays(1, LENGTH, 2, 64)[:3], jnp.int32(0))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_a_property_that_is_written_as_a_method_is_refused() -> None:
    message = r"Plain\.divides_positions: a method\n.*\n.*write @property"
    with pytest.raises(InputError, match=message):

        @M.mask_type
        class Plain(M.PositionMask):
            offset: int | None = None

            def divides_positions(self) -> bool:  # type: ignore[override]
                return False
