"""Rotary embeddings against literal complex multiplication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.errors import InputError
from maxattn.rope import Rotary, apply_rotary, rope_1d, rope_2d, rope_3d, rope_nd, split_3d
from tests.golden_text import check_refused

RNG = np.random.default_rng(0)


def heads(b: int, t: int, n: int, h: int) -> np.ndarray:
    return RNG.standard_normal((b, t, n, h)).astype(np.float32)


def as_complex(x: np.ndarray, style: str) -> np.ndarray:
    if style == "interleaved":
        return x[..., ::2] + 1j * x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


@pytest.mark.parametrize("style", ["interleaved", "half"])
@pytest.mark.parametrize("h", [2, 16, 40])
def test_1d_is_multiplication_by_unit_complex_numbers(style: str, h: int) -> None:
    x = heads(2, 7, 3, h)
    y = np.asarray(apply_rotary(jnp.asarray(x), rope_1d(h, 7, theta=500.0, style=style)))
    got, want = as_complex(y, style), as_complex(x, style)
    for t, i in np.ndindex(7, h // 2):
        factor = np.exp(1j * t * 500.0 ** (-2 * i / h))
        np.testing.assert_allclose(got[:, t, :, i], want[:, t, :, i] * factor, atol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "split"),
    [(128, (44, 42, 42)), (64, (24, 20, 20)), (16, (8, 4, 4)), (12, (4, 4, 4)), (6, (2, 2, 2))],
)
def test_3d_splits_the_head_as_wan(head_dim: int, split: tuple[int, ...]) -> None:
    assert split_3d(head_dim) == split


def wan(frames: Any, height: int, width: int) -> np.ndarray:
    """Compute e^(i angle) for heads of 128 in float64, [T, 64], by loops over tokens."""
    powers = [1e4 ** (-2 * np.arange(c // 2) / c) for c in (44, 42, 42)]
    rows = [
        np.concatenate([n * p for n, p in zip((f, y, x), powers, strict=True)])
        for f in np.asarray(frames, np.float64)
        for y in range(height)
        for x in range(width)
    ]
    return np.exp(1j * np.asarray(rows))


def test_3d_table_is_wans() -> None:
    table = rope_3d(128, 3, 4, 5)
    assert table.cos.shape == (60, 64)
    np.testing.assert_allclose(table.cos + 1j * table.sin, wan(range(3), 4, 5), atol=1e-7)


def test_2d_gives_rows_the_first_half_and_columns_the_second() -> None:
    table = rope_2d(8, 2, 3)
    angle = np.arctan2(table.sin, table.cos)
    np.testing.assert_allclose(angle[:, 0], [0, 0, 0, 1, 1, 1], atol=1e-6)
    np.testing.assert_allclose(angle[:, 2], [0, 1, 2, 0, 1, 2], atol=1e-6)
    np.testing.assert_allclose(angle[:, 3], np.asarray([0, 1, 2, 0, 1, 2]) * 1e4**-0.5, atol=1e-6)


def test_tables_are_numpy_float32_rounded_once() -> None:
    table = rope_1d(64, 76_000)
    assert isinstance(table.cos, np.ndarray) and table.cos.dtype == table.sin.dtype == np.float32
    exact = np.cos(75_999 * 1e4 ** (-np.arange(0, 64, 2) / 64))
    assert np.abs(table.cos[-1] - exact).max() < 6.1e-8  # half a unit in the last place below 1


# ---- tables of numbered frames, read on the host or traced ---------------------------------------

SIDES = (2, 3)


def frames(numbers: Any) -> Rotary:
    return rope_3d(128, numbers, *SIDES)


@pytest.mark.parametrize("first", [0, 250, 65_535, 100_000, 2_000_000, 2**31 - 4])
def test_traced_frames_are_exact_wherever_they_are(first: int) -> None:
    numbers = jnp.int32(first) + jnp.arange(3)
    got = jax.jit(frames)(numbers)
    want = wan(np.asarray(numbers), *SIDES)
    np.testing.assert_allclose(got.cos + 1j * got.sin, want, atol=6e-7)


def test_frames_below_256_have_the_hosts_very_bits() -> None:
    got, want = jax.jit(frames)(jnp.arange(200, 256)), frames(256)
    for a, b in ((got.cos, want.cos), (got.sin, want.sin)):
        np.testing.assert_array_equal(a, b[200 * 6 :])


def test_numbers_that_are_read_are_those_of_a_count() -> None:
    for numbers in (np.arange(4, 7), jnp.arange(4, 7)):
        got, want = frames(numbers), frames(7)
        assert isinstance(got.cos, np.ndarray)
        np.testing.assert_array_equal(got.cos, want.cos[4 * 6 :])
        np.testing.assert_array_equal(got.sin, want.sin[4 * 6 :])


def test_a_traced_frame_below_0_is_nan() -> None:
    """It cannot be refused as concrete frames are in `frames_negative`."""
    got = jax.jit(frames)(jnp.array([-1, 1]))
    for part, want in ((got.cos, frames(2).cos), (got.sin, frames(2).sin)):
        assert np.isnan(part[:6, :22]).all()  # the channels of time
        np.testing.assert_array_equal(part[6:], want[6:])


def test_frames_are_a_list_of_traced_numbers() -> None:
    got = jax.jit(lambda first: frames([first, first + 1]).cos)(4)
    np.testing.assert_array_equal(got, frames(6).cos[4 * 6 :])


@pytest.mark.parametrize("make", [frames, jax.jit(frames)])
def test_rows_have_frames_of_their_own(make: Any) -> None:
    rows = np.asarray([[0, 1], [7, 30]])
    got = make(jnp.asarray(rows))
    assert got.cos.shape == (2, 12, 64)
    for row, numbers in enumerate(rows):
        want = wan(numbers, *SIDES)
        np.testing.assert_allclose(got.cos[row] + 1j * got.sin[row], want, atol=2e-7)


# ---- what is rotated, and by what ----------------------------------------------------------------


def test_every_spelling_gives_the_same() -> None:
    x = jnp.asarray(heads(2, 6, 3, 8))
    table = rope_1d(8, 6)
    wide = [np.repeat(part, 2, axis=-1) for part in (table.cos, table.sin)]
    complex_table = table.cos + 1j * table.sin
    want = np.asarray(apply_rotary(x, table))
    spellings = [
        (table.cos, table.sin),
        tuple(wide),
        list(wide),
        complex_table,
        complex_table[None],
        complex_table[None, None],
        complex_table[None, :, None],
        jnp.asarray(complex_table),
        complex_table.astype(np.complex128),
        (wide[0][None, :, None], wide[1][None, :, None]),
        np.repeat(complex_table[None], 2, 0),
    ]
    for spelling in spellings:
        np.testing.assert_array_equal(apply_rotary(x, spelling), want)


def test_examples_may_have_positions_of_their_own() -> None:
    x = jnp.asarray(heads(2, 4, 1, 8))
    positions = np.asarray([[0, 1, 2, 3], [7, 5, 0, 2]])[..., None]
    y = apply_rotary(x, rope_nd((8,), positions))
    line = rope_1d(8, 8)
    for b in range(2):
        picked = Rotary(line.cos[positions[b, :, 0]], line.sin[positions[b, :, 0]])
        np.testing.assert_array_equal(y[b], apply_rotary(x[b : b + 1], picked)[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_low_precision_is_rotated_in_float32_and_rounded_once(dtype: jnp.dtype, style: str) -> None:
    x, table = jnp.asarray(heads(2, 50, 2, 16)).astype(dtype), rope_1d(16, 50, style=style)
    y = apply_rotary(x, table)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, apply_rotary(x.astype(jnp.float32), table).astype(dtype))


TABLE, WIDE = rope_1d(8, 6), rope_1d(16, 6)
BAD: dict[str, Callable[[Any], Any]] = {
    "rotary_length": lambda x: apply_rotary(x, rope_1d(8, 30)),
    "rotary_width": lambda x: apply_rotary(x, WIDE),
    "rotary_pair_of_wider_heads": lambda x: apply_rotary(x, (WIDE.cos, WIDE.sin)),
    "rotary_pair_by_halves": lambda x: apply_rotary(x, (np.tile(TABLE.cos, 2),) * 2),
    "rotary_pair_of_complex": lambda x: apply_rotary(x, (TABLE.cos + 1j, TABLE.sin + 1j)),
    "rotary_traced_pair_of_complex": lambda x: jax.jit(lambda c: apply_rotary(x, (c, c)))(
        TABLE.cos + 1j
    ),
    "rotary_of_positions": lambda x: apply_rotary(x, Rotary(*np.ones((2, 6, 4), int))),
    "rotary_of_lists": lambda x: apply_rotary(x, Rotary(TABLE.cos.tolist(), TABLE.sin.tolist())),
    "rotary_batch": lambda x: apply_rotary(x, np.ones((3, 6, 4), np.complex64)),
    "rotary_real_array": lambda x: apply_rotary(x, TABLE.cos, "rotary_emb_k"),
    "rotary_tuple_of_three": lambda x: apply_rotary(x, (TABLE.cos,) * 3),
    "rotary_string": lambda x: apply_rotary(x, "wan"),
    "rotary_odd_head": lambda x: apply_rotary(x[..., :7], TABLE),
    "rotary_style": lambda x: rope_1d(8, 6, style="interleave"),
    "rope_1d_odd": lambda x: rope_1d(7, 6),
    "rope_2d_odd_half": lambda x: rope_2d(6, 2, 2),
    "rope_3d_small": lambda x: rope_3d(4, 1, 2, 2),
    "rope_3d_no_frames": lambda x: rope_3d(12, 0, 2, 2),
    "theta": lambda x: rope_1d(8, 4, float("nan")),
    "rope_2d_theta": lambda x: rope_2d(8, 2, 2, theta=0.0),
    "rope_3d_theta": lambda x: rope_3d(12, 2, 2, 2, theta=float("nan")),
    "rope_nd_theta": lambda x: rope_nd((4, 4), np.zeros((6, 2)), theta=-1),
    "rope_positions": lambda x: rope_nd((4, 4), np.zeros((6, 3))),
    "positions_traced": lambda x: jax.jit(lambda at: rope_nd((8,), at).cos)(jnp.ones((6, 1))),
    "positions_of_unequal_rows": lambda x: rope_nd((8,), [[0.0], [1.0, 2.0]]),  # pyright: ignore
    "length_of_half_a_token": lambda x: rope_1d(8, 2.5),  # pyright: ignore
    "length_traced": lambda x: jax.jit(lambda n: rope_1d(8, n).cos)(6),
    "frames_a_bool": lambda x: frames(True),
    "split_beyond": lambda x: TABLE.split(7),
    "split_from_the_end": lambda x: TABLE.split(-1),
    "frames_of_unequal_rows": lambda x: frames([[1], [2, 3]]),
    "frames_of_floats": lambda x: frames(np.arange(3.0)),
    "frames_none": lambda x: frames(np.arange(0)),
    "frames_a_number": lambda x: frames(jnp.int32(3)),
    "frames_negative": lambda x: frames(np.asarray([-1, 0])),
    "frames_traced_floats": lambda x: jax.jit(frames)(jnp.arange(3.0)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    check_refused(f"rope/{name}", InputError, lambda: BAD[name](jnp.ones((2, 6, 1, 8))))


@pytest.mark.parametrize("theta", [float("inf"), 0, -1, -1e4, "1e4", None, True, 1j])
def test_a_theta_is_a_positive_number(theta: Any) -> None:
    with pytest.raises(InputError, match=r"^theta: "):
        rope_1d(8, 4, theta)


ANGLES = np.outer(np.arange(6), [1.0, 0.1, 0.01, 0.001])
ONES = jnp.ones((2, 6, 1, 8))
BY_HALVES = [np.concatenate([f(ANGLES)] * 2, -1).astype(np.float32) for f in (np.cos, np.sin)]
BY_PAIRS = [np.repeat(f(ANGLES), 2, -1).astype(np.float32) for f in (np.cos, np.sin)]


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_a_pair_whose_halves_are_alike_is_not_read_as_neighbours(array) -> None:
    """Nor is a traced pair, whose numbers cannot be compared; the remedies are right."""
    cos, sin = map(array, BY_HALVES)
    with pytest.raises(InputError, match="style='half'"):
        apply_rotary(ONES, (cos, sin))
    want = apply_rotary(ONES, Rotary(np.cos(ANGLES), np.sin(ANGLES)))
    twice = tuple(map(array, BY_PAIRS))
    np.testing.assert_allclose(apply_rotary(ONES, twice), want, atol=1e-6)
    with pytest.raises(InputError, match=r"Rotary\(cos\[\.\.\., ::2\].*style='half'"):
        jax.jit(lambda c, s: apply_rotary(ONES, (c, s)))(*twice)
    told = jax.jit(lambda c, s: apply_rotary(ONES, Rotary(c[..., ::2], s[..., ::2])))
    np.testing.assert_allclose(told(*twice), want, atol=1e-6)


@pytest.mark.parametrize(
    "theta", [500, 500.0, np.float32(500), np.int64(500), np.array(500.0), jnp.asarray(500.0)]
)
def test_any_positive_number_is_a_theta(theta: float) -> None:
    np.testing.assert_array_equal(rope_1d(8, 4, theta).cos, rope_1d(8, 4, 500.0).cos)


@pytest.mark.parametrize(
    ("positions", "theta"), [([[0.0], [np.nan]], 1e4), ([[np.inf]], 1e4), ([[1.0]], 1e-320)]
)
def test_no_table_holds_nan(positions: list[list[float]], theta: float) -> None:
    with pytest.raises(InputError, match="finite"):
        rope_nd((64,), np.asarray(positions), theta)


class OnOtherHosts:
    """A table of which this host has one whole copy, or a part."""

    is_fully_addressable = False

    def __init__(self, numbers: np.ndarray, whole: bool) -> None:
        self.numbers, self.is_fully_replicated = numbers, whole
        self.shape, self.dtype = numbers.shape, numbers.dtype

    def addressable_data(self, index: int) -> np.ndarray:
        return self.numbers

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.numbers)

    def __getitem__(self, key):
        return self.numbers[key]


def test_a_wide_table_is_read_or_refused() -> None:
    x, wrong = jnp.ones((1, 4, 1, 8)), np.arange(32, dtype=np.float32).reshape(4, 8)
    whole, part = (OnOtherHosts(wrong, each) for each in (True, False))
    with pytest.raises(InputError, match="each number twice"):
        apply_rotary(x, (whole, whole))
    for unread, f in ((part, apply_rotary), (wrong, jax.jit(apply_rotary))):
        with pytest.raises(InputError, match=r"Rotary\(cos\[\.\.\., ::2\]"):
            f(x, (unread, unread))
    right = OnOtherHosts(np.repeat(wrong[:, :4], 2, axis=1), True)
    assert np.isfinite(apply_rotary(x, (right, right))).all()


def test_as_many_tokens_as_heads_are_not_taken_for_heads() -> None:
    """[B, 1, T, D] has tokens, also if N = T; [B, T, N, D] with one token has heads."""
    whole, angles = heads(1, 3, 3, 8), RNG.uniform(0, 6, (1, 1, 3, 4))
    for x, own in ((whole, angles.reshape(1, 3, 1, 4)), (whole[:, :1], angles)):
        y = np.asarray(apply_rotary(jnp.asarray(x), Rotary(np.cos(angles), np.sin(angles))))
        want = as_complex(x, "interleaved") * np.exp(1j * own)
        np.testing.assert_allclose(as_complex(y, "interleaved"), want, atol=1e-6)
