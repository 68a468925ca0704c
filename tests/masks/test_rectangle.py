"""Pieces of a sequence that see pieces, known when tracing, in every kernel and on a ring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError
from maxattn.kernels.base import Inputs
from maxattn.kernels.blockwise.visits import visits
from maxattn.kernels.fa4 import mask_inputs
from maxattn.masks.tile_kinds import tile_kinds
from tests.context_parallel.test_ring import CONFIG as RING
from tests.context_parallel.test_ring import qkv
from tests.reference import attention64, error

TILE, LENGTH = 128, 512
AT = np.arange(LENGTH)
Q, K = AT[:, None], AT[None]
KERNELS = {
    "dot_product": {"attention": "dot_product"},
    "memory_efficient": {
        "attention": "dot_product",
        "use_memory_efficient_attention": True,
        "query_chunk_size": TILE,
        "key_chunk_size": TILE,
    },
    "flash": {"attention": "flash", "flash_block_sizes": {"block_q": TILE, "block_kv": TILE}},
}

# Flux.2: text and picture see all, reference tokens themselves alone.
OWN, REFERENCE = 384, 512
REFERENCES = M.Rectangle(0, OWN, 0, REFERENCE) | M.Rectangle(OWN, REFERENCE, OWN, REFERENCE)

# Qwen-Image 2.1: a causal text, and pictures whose tokens see each other.
PICTURES = (100, 228), (300, 500)
CAUSAL_OR_PICTURE = M.Causal() | M.Rectangle(*PICTURES[0] * 2) | M.Rectangle(*PICTURES[1] * 2)

# Block diffusion and teacher forcing: blocks of a clean sequence, then the same blocks noisy, each
# of which sees itself and the clean blocks before its own.
HALF, BLOCK = LENGTH // 2, 32
CLEAN = M.BlockCausal(BLOCK) & M.Rectangle(0, HALF, 0, HALF)
BEFORE = M.BlockCausal(BLOCK, offset=-HALF - BLOCK) & M.Rectangle(HALF, LENGTH, 0, HALF)
ITSELF = M.BlockSlidingWindow(BLOCK, 1) & M.Rectangle(HALF, LENGTH, HALF, LENGTH)
CLEAN_AND_NOISY = CLEAN | BEFORE | ITSELF

# Segments of several lengths, each of which sees itself and those before it.
ENDS = 60, 200, 201, 512
BY_SEGMENT = M.Empty()
for begin, end in zip((0, *ENDS), ENDS, strict=False):
    BY_SEGMENT = BY_SEGMENT | M.Rectangle(begin, end, 0, end)


def _noisy(at: np.ndarray) -> np.ndarray:
    return at >= HALF


def _block(at: np.ndarray) -> np.ndarray:
    return at % HALF // BLOCK


def _picture(at: np.ndarray) -> np.ndarray:
    return np.sum([i * ((at >= a) & (at < b)) for i, (a, b) in enumerate(PICTURES, 1)], axis=0)


def _segment(at: np.ndarray) -> np.ndarray:
    return np.searchsorted(ENDS, at, side="right")


SAME = _noisy(Q) & _noisy(K) & (_block(Q) == _block(K))
CASES: dict[str, tuple[M.Mask, np.ndarray]] = {
    "references": (REFERENCES, (Q < OWN) | (K >= OWN)),
    "causal or the same picture": (
        CAUSAL_OR_PICTURE,
        (K <= Q) | ((_picture(Q) == _picture(K)) & (_picture(Q) > 0)),
    ),
    "clean and noisy blocks": (
        CLEAN_AND_NOISY,
        (~_noisy(K) & np.where(_noisy(Q), _block(K) < _block(Q), _block(K) <= _block(Q))) | SAME,
    ),
    "causal by segment": (BY_SEGMENT, _segment(K) <= _segment(Q)),
    "one": (M.Rectangle(130, 300, 7, 260), (Q >= 130) & (Q < 300) & (K >= 7) & (K < 260)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_is_allowed(name: str) -> None:
    mask, want = CASES[name]
    bound = mask.bind(LENGTH, LENGTH)
    np.testing.assert_array_equal(np.asarray(bound.allowed(AT, AT))[0, 0], want)
    assert bound.allowed_pairs(LENGTH, LENGTH) == want.sum()


@pytest.mark.parametrize("name", CASES)
def test_no_list_of_tiles_has_an_empty_one(name: str) -> None:
    mask, want = CASES[name]
    bound = mask.bind(LENGTH, LENGTH)
    some = want.reshape(4, TILE, 4, TILE).any((1, 3))
    assert visits(bound, TILE, TILE, LENGTH, LENGTH).count.sum() == some.sum()
    kinds = tile_kinds(bound, TILE, TILE, LENGTH, LENGTH, 0, 0)
    np.testing.assert_array_equal(kinds != M.EMPTY, some)
    x = jnp.zeros((1, LENGTH, 2, 64), jnp.bfloat16)
    pairs = mask_inputs.listed(Inputs(x, x, x, None, bound)).pairs
    assert pairs is not None and pairs.tiles is not None
    arrays = tuple(np.asarray(x) for x in mask_inputs.arrays(pairs))
    np.testing.assert_array_equal(pairs.tiles.test(0, Q, K, arrays, np), want)


@pytest.mark.parametrize("name", CASES)
def test_an_h200_skips_by_it(name: str) -> None:
    """`auto` takes a kernel that goes by lists of tiles, and no plain JAX."""
    call = ma.Call(1, LENGTH, LENGTH, 8, 8, 128, dtype="bfloat16", mask=CASES[name][0])
    target = ma.Target.named("NVIDIA H200", (("fa4-jax", "0.1.0"),))
    assert ma.plan(call, ma.AttentionConfig(attention="auto"), target=target).kernel.name == "flash"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["clean and noisy blocks"])
def test_forward_and_gradients_against_float64(name: str, kernel: str) -> None:
    (mask, allowed), config = CASES[name], ma.AttentionConfig(**KERNELS[kernel])
    rng = np.random.default_rng(0)
    q, k, v, weight = (jnp.asarray(rng.normal(size=(1, LENGTH, 1, 32)), "float32") for _ in "qkvw")

    def loss(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = ma.attention(*x, mask=mask, config=config)
        return (out * weight).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    want = attention64(q, k, v, allowed[None, None], dout=weight)
    assert max(error(g, w) for g, w in zip((out, *grads), want[:1] + want[2:5], strict=True)) < 2e-5


def test_on_a_ring() -> None:
    config = RING.replace(attention="dot_product", context_parallel="ring")
    mask, (q, k, v) = M.Causal() | M.Rectangle(10, 40, 12, 50), qkv(61, heads=8)
    mesh = config.make_mesh()
    out = jax.jit(lambda *x: ma.attention(*x, mask=mask, config=config, mesh=mesh))(q, k, v)
    plain = ma.AttentionConfig(attention="dot_product")
    np.testing.assert_allclose(out, ma.attention(q, k, v, mask=mask, config=plain), atol=2e-5)


def test_equal_rectangles_are_equal() -> None:
    assert (
        M.Rectangle(1, 5, 2, 2) == M.Empty() or M.Rectangle(1, 5, 2, 2) | M.Causal() == M.Causal()
    )
    assert hash(M.Rectangle(1, 5, 2, 3)) == hash(M.Rectangle(1, 5, 2, 3)) != hash(M.Causal())


@pytest.mark.parametrize(
    ("numbers", "setting"),
    [((4, 3, 0, 1), "q_stop"), ((0, 1, 9, 2), "kv_stop"), ((-1, 3, 0, 1), "q_start")],
)
def test_other_numbers_are_refused(numbers: tuple[int, int, int, int], setting: str) -> None:
    with pytest.raises(InputError) as caught:
        M.Rectangle(*numbers)
    assert caught.value.setting == f"Rectangle.{setting}"
