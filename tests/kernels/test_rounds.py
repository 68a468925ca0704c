"""Rows of a backward that do not fill a GPU's processors: launched in parts, or along with a ring's blocks."""

from __future__ import annotations

import heapq

import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.kernels import fa4_rounds
from maxattn.kernels.fa4_rounds import LAUNCH, SUMS, Tail, tail_for, tail_of
from maxattn.kernels.tile_order import START
from maxattn.shapes import SHAPES, read
from tests.reference import attention64, error

H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),))


def ends(rows: list[int], processors: int) -> int:
    """Return when the last row ends, if each processor takes the next one as soon as it is free."""
    free = [0] * processors
    for row in rows:
        heapq.heapreplace(free, free[0] + row)
    return max(free)


def played(tail: Tail | None, tiles: int, rows: int, steps: int, processors: int) -> int:
    """Return when a backward ends, row by row: of what is launched whole, then of what is in parts."""
    whole = ends([steps + START] * ((tiles - (tail.tiles if tail else 0)) * rows), processors)
    if tail is None:
        return whole
    parts = [(p + 1) * steps // tail.parts - p * steps // tail.parts for p in range(tail.parts)]
    assert min(parts) > 0 and sum(parts) == steps, "every part has queries"
    after = ends([part + START for part in parts for _ in range(tail.tiles * rows)], processors)
    return whole + after + SUMS + (LAUNCH if whole else 0)


@pytest.mark.parametrize("processors", [132, 78])
def test_parts_end_sooner(processors: int) -> None:
    rng, gains = np.random.default_rng(0), 0
    for _ in range(300):
        tiles, rows, steps = (int(rng.integers(1, most)) for most in (60, 170, 450))
        tail = tail_of(tiles, rows, steps, processors)
        before, now = (played(x, tiles, rows, steps, processors) for x in (None, tail))
        assert now <= (0.99 * before if tail else before)
        gains += tail is not None
    assert 50 < gains < 250


@pytest.mark.parametrize(
    "sizes, tail",
    [
        ((256, 12, 410), Tail(3, 11)),  # 253 tiles of 12 heads are 23.0 rounds of 132
        ((4, 12, 410), Tail(4, 11)),  # a text: 48 rows, for 132 processors
        ((33, 40, 410), None),  # ten whole rounds
        ((1, 160, 32), Tail(1, 4)),
        ((1, 12, 1), None),  # one tile of queries has no parts
        ((1, 1, 2), None),  # too short: sums of parts would take longer
    ],
)
def test_what_is_in_parts(sizes: tuple[int, int, int], tail: Tail | None) -> None:
    assert tail_of(*sizes) == tail


def test_the_chosen_tail_is_the_best() -> None:
    for sizes in ((256, 12, 410), (36, 48, 58), (64, 40, 103), (5, 30, 90)):
        ways = [Tail(n, p) for n in range(1, sizes[0] + 1) for p in range(2, min(16, sizes[2]) + 1)]
        best = min(played(x, *sizes, 132) for x in ways)
        assert played(tail_of(*sizes), *sizes, 132) <= 1.01 * best


def test_only_heads_of_their_own_keys_are_in_parts() -> None:
    q, k = (1, 32760, 12, 128), (1, 512, 12, 128)
    assert tail_for(q, k) == Tail(4, 11)
    assert tail_for(q, (1, 512, 4, 128)) is None, "query heads that share keys add dK up in float32"
    assert tail_for((*q[:3], 192), (*k[:3], 192)) is None and tail_for((*q[:3], 100), (*k[:3], 100)) is None
    assert fa4_rounds.tail_for((2, 4608, 24, 128), (2, 4608, 24, 128)) == Tail(3, 5)


@pytest.mark.parametrize(
    "shape, config, room",
    [
        ("wan-14b-480p", {}, 256),
        ("wan-14b-720p", {}, 0),  # no block ends within a round
        ("2,32760,32760,40,128", {}, 0),  # two batch rows stand apart
        ("wan-14b-480p", {"attention": "cudnn"}, 0),
    ],
)
def test_a_plan_knows_for_what_blocks_have_room(shape: str, config: dict, room: int) -> None:
    call = (SHAPES.get(shape) or read(shape)).call()
    asked = ma.AttentionConfig(**{"attention": "flash", "context_parallel": "ring", **config})
    made = ma.plan(call, asked, {"context": 4}, H200)
    keys = 8190 if call.q_len == 32760 else 18900
    assert made.context.room == room  # type: ignore[attr-defined]
    size = 2 * 2 * call.batch * (keys + room) * 40 * 128
    assert {c.bytes for c in made.collectives} == {3 * size}
    causal = ma.plan(ma.Call.of(*arrays(), mask=ma.masks.Causal()), asked, {"context": 4}, H200)
    assert causal.context.room == 0  # type: ignore[attr-defined]


def arrays() -> tuple:
    import jax

    return tuple(jax.ShapeDtypeStruct((1, 32760, 40, 128), "bfloat16") for _ in range(2))


def test_a_forward_is_in_parts_where_that_gains_more_than_their_merge() -> None:
    wan, flux = (1, 32760, 12, 128), (2, 4608, 24, 128)
    assert fa4_rounds.queries_for(wan, wan) == Tail(3, 7) and fa4_rounds.queries_for(flux, flux) == Tail(3, 4)
    place = (1, 8190, 40, 128)
    assert fa4_rounds.queries_for(place, place) is None and tail_for(place, place) == Tail(8, 2)
    assert fa4_rounds.queries_for(wan, (1, 512, 12, 128)) is None
    short = (1, 700, 2, 128)  # 12 rows for 132 processors: no round is whole, and none is launched as ever
    assert fa4_rounds.queries_for(short, short) is None


def test_parts_of_the_keys_are_merged_by_their_lse() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(2, t, 3, 8)), jnp.float32) for t in (5, 12, 12))
    want = attention64(q, k, v)
    each = [attention64(q, k[:, i : i + 4], v[:, i : i + 4]) for i in (0, 4, 8)]
    out, lse = (jnp.stack([jnp.asarray(getattr(x, name), jnp.float32) for x in each]) for name in ("out", "lse"))
    got = fa4_rounds._merged(out, lse)
    assert error(got[0], want.out) < 1e-6 and error(got[1], want.lse) < 1e-6
