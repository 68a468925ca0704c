"""Unions of many rectangles: pairs by brute force, intervals, forms. Segments of known lengths."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import reduce
from operator import and_, or_

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError
from maxattn.kernels.flash import Flash
from maxattn.kernels.splash import mask_codes
from maxattn.tools.cli.masks import read_mask

Made = tuple[list[M.Rectangle], np.ndarray]


def drawn(count: int, length: int) -> Made:
    rng = np.random.default_rng(count)
    ends = np.sort(rng.integers(0, length + 1, (count, 2, 2)), axis=2)
    corners = ends.reshape(count, 4).tolist()
    table = np.zeros((length, length), bool)
    for q0, q1, k0, k1 in corners:
        table[q0:q1, k0:k1] = True
    return [M.Rectangle(*corner) for corner in corners], table


def scattered(count: int, length: int) -> Made:
    """Draw small rectangles, so that a query has several intervals."""
    rng = np.random.default_rng(count)
    table, found = np.zeros((length, length), bool), []
    for q, k in rng.integers(0, length, (count, 2)):
        found.append(M.Rectangle(int(q), int(q) + 3, int(k), int(k) + 2))
        table[q : q + 3, k : k + 2] = True
    return found, table


CASES: dict[str, Made] = {
    "33 drawn": drawn(33, 60),
    "200 drawn": drawn(200, 64),
    "300 small": scattered(300, 100),
    "40 small": scattered(40, 50),
}
JOINED: dict[str, Callable[[list[M.Rectangle]], M.Mask]] = {
    "one by one": lambda some: reduce(or_, some),
    "at once": lambda some: M.Or(tuple(some)),
    "backwards": lambda some: reduce(or_, some[::-1]),
    "negated twice": lambda some: ~reduce(and_, (~each for each in some)),
    "under causal, apart": lambda some: reduce(or_, (each & M.Causal() for each in some)),
    "under causal": lambda some: reduce(or_, some) & M.Causal(),
    "beside causal": lambda some: reduce(or_, [M.Causal(), *some]),
    "but not": lambda some: M.LocalWindow(20, 20) & ~reduce(or_, some),
}


def expected(how: str, table: np.ndarray) -> np.ndarray:
    q, k = np.mgrid[: len(table), : len(table)]
    if how.startswith("under causal"):
        return table & (k <= q)
    if how == "beside causal":
        return table | (k <= q)
    return ~table & (abs(q - k) <= 20) if how == "but not" else table


@pytest.mark.parametrize("how", JOINED)
@pytest.mark.parametrize("name", CASES)
def test_the_pairs_are_those_of_the_rectangles(name: str, how: str) -> None:
    some, table = CASES[name]
    want, size = expected(how, table), len(table)
    mask = JOINED[how](some).bind(size, size)
    at = np.arange(size)
    np.testing.assert_array_equal(np.asarray(mask.allowed(at, at))[0, 0], want)
    traced = jax.jit(lambda at: mask.allowed(at, at))(jnp.arange(size))
    np.testing.assert_array_equal(np.asarray(traced)[0, 0], want)
    assert mask.has_exact_intervals and mask.allowed_pairs(size, size) == want.sum()


@pytest.mark.parametrize("name", CASES)
def test_one_union_is_one_value(name: str) -> None:
    some, table = CASES[name]
    ways = ("one by one", "at once", "backwards", "negated twice")
    made = {JOINED[how](some).bind(len(table), len(table)) for how in ways}
    assert len(made) == 1


def test_more_intervals_than_a_kernel_takes_are_counted_and_refused() -> None:
    """The first query rows have every second key, the others one key."""
    comb = M.Or(tuple(M.Rectangle(0, 8, k, k + 1) for k in range(0, 80, 2)))
    call = ma.Call(1, 80, 80, 4, 4, 64, "bfloat16", mask=comb | M.Rectangle(8, 80, 0, 1))
    target = ma.Target.named("NVIDIA H200", packages={"fa4-jax": "0.1.0"})
    config = ma.AttentionConfig(attention="flash", fallback="warn")
    text = ma.plan(call, config, None, target).explain()
    assert "32 intervals of keys per query, and the mask has 40" in text


@pytest.mark.parametrize("count", [33, 3000])
def test_auto_takes_flash_for_many_rectangles(count: int) -> None:
    rows = M.Or(tuple(M.Rectangle(128 * i, 128 * i + 128, 0, 128 * i + 128) for i in range(count)))
    call = ma.Call(1, count * 128, count * 128, 12, 12, 128, "bfloat16", mask=rows)
    target = ma.Target.named("NVIDIA H200", packages={"fa4-jax": "0.1.0"})
    plan = ma.plan(call, ma.AttentionConfig(attention="auto"), None, target)
    assert plan.kernel.name == "flash"
    assert call.mask.allowed_pairs(call.q_len, call.kv_len) == 128 * 128 * count * (count + 1) // 2


def test_corners_are_checked() -> None:
    with pytest.raises(InputError, match=r"Rectangle\.q_stop"):
        M.Rectangles(((3, 1, 0, 2),))
    with pytest.raises(InputError, match=r"join masks\.Rectangle"):
        M.Rectangles((1, 2, 3, 4))  # type: ignore[arg-type]
    assert M.Rectangles(((1, 1, 0, 2),)).bind(4, 4) == M.Empty()


# ---- segments whose lengths are known when tracing -----------------------------------------------


def test_equal_masks_are_equal_however_they_are_said() -> None:
    of = M.Segments.of_lengths
    assert of((4, 0, 3)) == of([4, 3], (4, 3)) == of(np.array([4, 3]))
    assert hash(of((4, 3))) == hash(of([4, 3])) and of((4, 3)) != of((3, 4))
    assert of((4, 3)) & of((4, 3)) == of((4, 3))
    assert of((4, 4, 3)).bind(11, 11) == M.BlockSlidingWindow(4, 1, 0)
    assert of((11,)).bind(11, 11) == M.Full()
    assert of((4, 7), (7, 4)).bind(11, 11) == of((4, 7), (7, 4))
    assert pickle.loads(pickle.dumps(of((4, 3)))) == of((4, 3))
    assert read_mask("segments:4,3+causal") == of((4, 3)) & M.Causal()


def test_what_is_written_is_short() -> None:
    assert str(M.Segments.of_lengths((512,) * 7 + (3,))) == "Segments.of_lengths((512 x 7, 3))"
    many = str(M.Segments.of_lengths(range(1, 1001)))
    assert many.endswith("8, ... 1000 segments of 500500 tokens))") and len(many) < 100


def test_millions_of_tokens_in_thousands_of_segments() -> None:
    """The counts are the sums over segments."""
    lengths = np.random.default_rng(0).integers(1, 9000, 4000)
    total = int(lengths.sum())
    assert total > 10**7
    mask = (M.Segments.of_lengths(lengths) & M.Causal()).bind(total, total)
    assert mask.allowed_pairs(total, total) == int((lengths * (lengths + 1) // 2).sum())
    empty, full, mixed = mask.block_tally(128, 128, total, total)
    blocks = -(-total // 128)
    assert empty + full + mixed == blocks**2
    across = -(-lengths // 128) + 1  # blocks that a segment can lie in
    assert blocks <= full + mixed <= (across * (across + 1) // 2).sum()


def test_a_kernel_goes_through_few_segments_by_arithmetic() -> None:
    """Inside a kernel arithmetic replaces the table, and gives equal results."""
    mask, at = M.Segments.of_lengths((5, 0, 9, 2), (3, 4, 0, 9)), np.arange(16, dtype=np.int32)
    code = mask_codes.Positions(mask, 16, 0)
    rows, keys = (jnp.asarray(x) for x in np.broadcast_arrays(at[:, None], at[None]))
    assert (np.asarray(code(rows, keys)) == np.asarray(mask.allowed(at, at))[0, 0]).all()


def test_splash_refuses_more_segments_than_it_goes_through() -> None:
    length = 2**20
    lengths = (length // 2, *(length // 2 // 128 - i % 2 * 2 + 1 for i in range(128)))
    call = ma.Call(1, length, length, 1, 1, 64, mask=M.Segments.of_lengths(lengths))
    reason = Flash.supports(call, ma.Target.named("TPU v5p"))
    assert reason is not None and "at most 64 segments" in reason.rule
    few = ma.Call(1, 4096, 4096, 1, 1, 64, mask=M.Segments.of_lengths((63, *range(1, 90), 28)))
    assert Flash.supports(few, ma.Target.named("TPU v5p")) is None
