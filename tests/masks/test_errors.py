"""Golden messages of refused masks; MAXATTN_REGOLD=1 rewrites them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError
from tests.golden_text import check_refused, golden_texts

BAD: dict[str, Callable[[], object]] = {
    "causal_more_queries_than_keys": lambda: M.Causal().bind(8, 4),
    "below_connectives_more_queries_than_keys": lambda: (
        M.KeyPadding([3]) & ~M.BlockCausal(2)
    ).bind(8, 4),
    "unbound_allowed": lambda: M.Causal().allowed(np.arange(3), np.arange(5)),
    "window_negative": lambda: M.LocalWindow(-1, 0),
    "window_float": lambda: M.LocalWindow(2, 1.5),  # pyright: ignore[reportArgumentType]
    "window_of_no_blocks": lambda: M.BlockSlidingWindow(1560, 0),
    "window_of_too_many_blocks": lambda: M.BlockSlidingWindow(1560, 10**6),
    "limit_beyond_positions": lambda: M.KeyLimit(2**31),
    "block_zero": lambda: M.BlockCausal(0),
    "block_bool": lambda: M.BlockCausal(True),
    "offset_traced": lambda: jax.jit(
        lambda o: M.Causal(offset=o).allowed(jnp.arange(2), jnp.arange(2))
    )(1),
    "sink_beyond_budget": lambda: M.VideoMask(21, 1560, frames_per_block=3, window=2, sink=4),
    "video_wrong_length": lambda: M.VideoMask(21, 1560).bind(32_760, 32_768),
    "lengths_float": lambda: M.KeyPadding(np.array([3.0, 4.0])),
    "lengths_2d": lambda: M.KeyPadding(np.array([[3, 4]])),
    "lengths_of_unequal_rows": lambda: M.KeyPadding([[3], [4, 5]]),
    "flags_1d": lambda: M.KeyPadding(np.array([True, False])),
    "flags_additive": lambda: M.KeyPadding(np.zeros((2, 5), np.float32)),
    "flags_0_and_1": lambda: M.KeyPadding(np.zeros((2, 5), np.int32)),
    "flags_4d": lambda: M.KeyPadding(np.ones((2, 1, 1, 5), bool)),
    "flags_wrong_length": lambda: M.KeyPadding(np.ones((2, 5), bool)).bind(4, 6),
    "flags_of_one_key": lambda: M.KeyPadding(np.ones((2, 1), bool)).bind(4, 6),
    "segments_of_one_key": lambda: M.Segments(np.zeros((2, 4), int), np.zeros((2, 1), int)).bind(
        4, 6
    ),
    "lengths_wrong_batch": lambda: M.KeyPadding(np.array([3, 4])).bind(4, 6, batch=3),
    "segments_float": lambda: M.Segments(np.zeros((2, 4)), np.zeros((2, 6), int)),
    "segments_beyond_int32": lambda: M.Segments(np.array([[2**32, 0]]), np.array([[0, 0]])),
    "segments_1d": lambda: M.Segments(np.zeros((2, 4), int), np.zeros(6, int)),
    "segments_wrong_length": lambda: M.Segments(np.zeros((2, 4), int), np.zeros((2, 6), int)).bind(
        6, 4
    ),
    "rectangle_backwards": lambda: M.Rectangle(0, 8, 6, 4),
    "rectangle_of_queries_backwards": lambda: M.Rectangle(4, 3, 0, 1),
    "rectangle_below_0": lambda: M.Rectangle(-1, 8, 0, 4),
    "packed_float": lambda: M.Segments.of_lengths((4096, 0.5)),  # pyright: ignore[reportArgumentType]
    "packed_negative": lambda: M.Segments.of_lengths((4096, -512)),
    "packed_traced": lambda: jax.jit(lambda n: M.Segments.of_lengths(n).show(4, 4))(
        jnp.array([2, 2])
    ),
    "packed_too_many": lambda: M.Segments.of_lengths((1,) * (2**16 + 1)),
    "packed_too_long": lambda: M.Segments.of_lengths((2**29,) * 3),
    "packed_other_count": lambda: M.Segments.of_lengths((4, 4), (8,)),
    "packed_too_short": lambda: M.Segments.of_lengths((4096, 512)).bind(8192, 8192),
    "packed_past_the_end": lambda: M.Segments.of_lengths((4096, 512)).bind(4000, 4000),
    "packed_of_other_keys": lambda: M.Segments.of_lengths((10, 20), (7, 8)).bind(30, 77),
    "dense_float": lambda: M.Dense(jnp.zeros((4, 6))),
    "dense_integers": lambda: M.Dense(np.ones((4, 6), int)),
    "dense_1d": lambda: M.Dense(np.ones(6, bool)),
    "dense_5d": lambda: M.Dense(np.ones((1, 1, 1, 4, 6), bool)),
    "dense_wrong_shape": lambda: M.Dense(np.ones((6, 4), bool)).bind(4, 6),
    "dense_wrong_heads": lambda: M.Dense(np.ones((2, 3, 4, 6), bool)).bind(4, 6, batch=2, heads=8),
    "array_without_dense": lambda: M.Causal() & np.ones((4, 6), bool),  # pyright: ignore[reportOperatorIssue]
    "and_of_text": lambda: M.And((M.Causal(), "causal")),  # type: ignore[arg-type]
    "or_of_one_mask": lambda: M.Or(M.Causal()),  # type: ignore[arg-type]
    "or_of_nothing": lambda: M.Or(()),
    "not_of_a_list": lambda: M.Not([M.Causal()]),  # type: ignore[arg-type]
    "python_and": lambda: M.Causal() and M.KeyPadding([3]),
    "block_map_of_no_tokens": lambda: M.Causal().block_map(0, 128, 4, 6),
    "show_too_narrow": lambda: M.Causal().show(4, 4, width=3),
    "show_batch_beyond": lambda: M.KeyPadding([3, 4]).show(4, 6, batch=2),
}


@pytest.mark.parametrize("name", BAD)
def test_message(name: str) -> None:
    check_refused(f"masks/error_{name}", InputError, BAD[name])


def test_every_golden_error_has_its_case() -> None:
    errors = {name for name in golden_texts("masks") if name.startswith("error_")}
    assert errors == {f"error_{name}" for name in BAD}


def test_what_is_legal_beside_each_edge() -> None:
    """The nearest legal value to each refused one is accepted."""
    M.LocalWindow(0, 0), M.BlockSlidingWindow(1560, 1), M.KeyLimit(0), M.Causal(offset=-3)
    M.VideoMask(21, 1560, frames_per_block=3, window=2, sink=3)
    M.Causal(offset=np.int64(2)).bind(8, 4)
    M.Full().bind(8, 4), M.KeyPadding([3]).bind(8, 4), M.KeyLimit(2).bind(8, 4)
    M.Dense(np.ones((1, 6), bool)).bind(4, 6, batch=3, heads=2)
    M.KeyPadding(np.ones((1, 6), bool)).bind(4, 6, batch=3)
    M.VideoMask(21, 1560).bind(4680, 32_760)


def test_lists_may_have_traced_numbers() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 4, 1, 8))

    def attend(n: jax.Array) -> jax.Array:
        mask = M.KeyPadding([n, 4]) & M.Segments([[n, n, 0, 0]], [[n, n, 0, 0]])
        return ma.attention(x, x, x, mask=mask)

    np.testing.assert_allclose(jax.jit(attend)(3), attend(np.int32(3)), atol=1e-6)


@pytest.mark.parametrize("make", [np.array, jnp.array])
@pytest.mark.parametrize("lengths", [[3, 65], [-4, 64]])
def test_lengths_that_no_sequence_has_are_refused(lengths: list[int], make: Any) -> None:
    x = jnp.ones((2, 64, 1, 8))
    with pytest.raises(InputError, match=r"KeyPadding\.keys\[[01]\]: (65|-4)"):
        ma.attention(x, x, x, mask=M.KeyPadding(make(lengths)))
    run = jax.jit(lambda n: ma.attention(x, x, x, mask=M.KeyPadding(n)))
    clipped = np.clip(lengths, 0, 64)
    np.testing.assert_array_equal(run(jnp.array(lengths)), run(jnp.array(clipped)))
